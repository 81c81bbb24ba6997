"""Prints the Markdown page of every gin binding: `python -m jaxrl_llm.tools.pages.bindings > docs/reference/bindings.md`.

A binding is a field of a component. Components are the classes and functions named by the files in gin/, and every frozen,
keyword-only dataclass of the packages from which a run is composed. Types and defaults come from the code, meanings from docstrings.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.components import FACES, home, selector
from jaxrl_llm.tools.pages import macros

GIN = Path(__file__).parents[2] / "gin"
# The packages that re-export components, and the rooms and modules whose classes are components.
COMPOSED_FROM = (
    *(face.removeprefix("jaxrl_llm.") for face in FACES),
    *("algorithms", "models", "rewards", "data", "eval", "samplers.sampled_classmate", "environments"),
)
# Modules of frozen dataclasses that only code creates.
INTERNAL = (
    "data.pipeline",
    "data.prepare",
    "algorithms.batch",
    "models.hf_format",
    "models.attention",
    "models.transformer",
    "rewards.services.load_test",
    "eval.viewer.query",
    "eval.reports.jobs",
)
# An import of a gin file, and a reference `name.Component` to an imported module.
IMPORT = re.compile(
    r"^(?:from\s+(?P<package>[\w.]+)\s+)?import\s+(?P<name>[\w.]+)(?:\s+as\s+(?P<alias>\w+))?", re.MULTILINE
)
REFERENCE = re.compile(r"(?<![\w.])(?P<alias>\w+)\.(?P<name>[A-Za-z_]\w*)")

Component = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binding:
    """A parameter of a component.

    Attributes:
      name: gin's name, `module.Component.parameter`.
      type: the parameter's annotation, without module names.
      default: the default in Python's spelling, or "required".
      meaning: the docstring's text for the parameter; empty where there is none.
    """

    name: str
    type: str
    default: str
    meaning: str


def components() -> list[Component]:
    """Returns every component, ordered by module and name."""
    referred = set(referred_to(GIN))
    composed = {c for name in COMPOSED_FROM for module in modules(f"jaxrl_llm.{name}") for c in defined_in(module)}
    bases = {base for c in composed for base in c.__mro__[1:]}
    found = referred | (composed - bases)
    return sorted((c for c in found if bindings(c)), key=lambda c: (home(c), c.__qualname__))


def referred_to(folder: Path) -> Iterator[Component]:
    """Yields the classes and functions of this package that the gin files below `folder` name."""
    for file in sorted(folder.rglob("*.gin")):
        text = re.sub(r"#.*", "", file.read_text())
        imported = {}
        for found in IMPORT.finditer(text):
            full = ".".join(filter(None, (found["package"], found["name"])))
            if full.startswith("jaxrl_llm"):
                imported[found["alias"] or found["name"]] = full
        for found in REFERENCE.finditer(text):
            if found["alias"] in imported:
                module = importlib.import_module(imported[found["alias"]])
                component = getattr(module, found["name"], None)
                if inspect.isclass(component) or inspect.isfunction(component):
                    yield component


def modules(name: str) -> Iterator[ModuleType]:
    """Yields a module or a re-exporting package, or every module of another package except those without components."""
    module = importlib.import_module(name)
    yield module
    if name in FACES:
        return
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
        if not any(f"{found.name}.".startswith(f"jaxrl_llm.{internal}.") for internal in INTERNAL):
            yield importlib.import_module(found.name)


def defined_in(module: ModuleType) -> Iterator[Any]:
    """Yields the components that a module defines or re-exports: public, frozen, keyword-only dataclasses."""
    handed_on = module.__name__ in FACES
    for name, value in vars(module).items():
        here = inspect.isclass(value) and (handed_on or value.__module__ == module.__name__)
        own = here and not name.startswith("_")
        if own and dataclasses.is_dataclass(value) and is_settings(value):
            yield value


def is_settings(owner: Any) -> bool:
    """Returns whether a dataclass is frozen and takes its fields by name."""
    return owner.__dataclass_params__.frozen and all(field.kw_only for field in dataclasses.fields(owner))


def bindings(component: Component) -> list[Binding]:
    """Returns the bindings that gin may set: all fields of a class, or the parameters of a function that have defaults."""
    said = meanings(component)
    found = []
    for name, parameter in inspect.signature(component).parameters.items():
        default = default_of(component, parameter)
        if default != "required" or inspect.isclass(component):
            full = f"{selector(component)}.{name}"
            shown = type_name(parameter.annotation)
            found.append(Binding(name=full, type=shown, default=default, meaning=said.get(name, "")))
    return found


def default_of(component: Component, parameter: inspect.Parameter) -> str:
    """Returns a parameter's default in Python's spelling, or "required"."""
    if dataclasses.is_dataclass(component):
        (field,) = (f for f in dataclasses.fields(component) if f.name == parameter.name)
        if field.default_factory is not dataclasses.MISSING:
            return spelled(field.default_factory())
    return "required" if parameter.default is inspect.Parameter.empty else spelled(parameter.default)


def spelled(value: Any) -> str:
    """Spells a default as a reader would write it, the same in every run."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    if inspect.isclass(value) or inspect.isfunction(value):
        return str(value.__name__)
    if dataclasses.is_dataclass(value):
        changed = [f for f in dataclasses.fields(value) if f.repr and getattr(value, f.name) != f.default]
        return f"{type(value).__name__}({', '.join(f'{f.name}={spelled(getattr(value, f.name))}' for f in changed)})"
    return f"{type(value).__name__}()" if " object at 0x" in repr(value) else repr(value)


def type_name(annotation: Any) -> str:
    """Returns an annotation without the names of modules: `int | None`, `Sequence[Prompt]`."""
    name = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", name)


def meanings(component: Component) -> dict[str, str]:
    """Returns {parameter: meaning} from the `Attributes:` or `Args:` blocks of a docstring, including those of base classes."""
    said: dict[str, str] = {}
    for owner in reversed(getattr(component, "__mro__", (component,))):
        said |= block(inspect.cleandoc(owner.__doc__ or ""))
    return said


def block(docstring: str) -> dict[str, str]:
    """Returns the entries `  name: meaning` of a cleaned docstring's block; deeper lines continue an entry."""
    said: dict[str, str] = {}
    inside, name = False, ""
    for line in docstring.splitlines():
        if not line.startswith(" "):
            inside = line in ("Attributes:", "Args:") or (inside and not line)
        elif inside and (entry := re.match(r"  (\w+): (.+)", line)):
            name = entry[1]
            said[name] = entry[2].strip()
        elif inside and name:
            said[name] += f" {line.strip()}"
    return said


def shared(listed: Sequence[Component]) -> list[Component]:
    """Returns the base classes from which two or more of the components inherit fields, ordered by module and name."""
    counts = Counter(base for component in listed for base in _bases(component))
    several = [base for base, count in counts.items() if count > 1 and base not in listed]
    return sorted((c for c in several if given(c, several)), key=lambda c: (home(c), c.__qualname__))


def given(component: Component, elsewhere: Sequence[Component]) -> list[Binding]:
    """Returns the component's bindings, without those that it inherits unchanged from its bases among `elsewhere`."""
    field = lambda b: dataclasses.replace(b, name=b.name.rpartition(".")[2])  # noqa: E731
    bases = [base for base in _bases(component) if base in elsewhere]
    known = {field(b).name: field(b) for base in reversed(bases) for b in bindings(base)}
    return [b for b in bindings(component) if known.get(field(b).name) != field(b)]


def _bases(component: Component) -> list[Component]:
    """Returns the component's base classes that have fields, the nearest first."""
    return [base for base in getattr(component, "__mro__", ())[1:] if hasattr(base, "__dataclass_fields__")]


def section(component: Component, elsewhere: Sequence[Component] = ()) -> str:
    """Writes the section of one component: its module, its description, and its bindings without those of bases that have own sections."""
    package, _, module = home(component).rpartition(".")
    first = inspect.cleandoc(component.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    names = [base.__name__ for base in _bases(component) if base in elsewhere]
    also = f" Also the fields of {', '.join(names)}." if names else ""
    head = f"## {selector(component)}\n\n`from {package} import {module}`. {first}{also}\n"
    rows = [(f"`{b.name}`", f"`{b.type}`", f"`{b.default}`", b.meaning) for b in given(component, elsewhere)]
    if not rows:
        return head
    rows = [("binding", "type", "default", "meaning"), ("---",) * 4, *rows]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    return f"{head}\n{table}\n"


def page() -> str:
    """Returns the whole page: the macros, then every component."""
    opening = (
        "# Settings\n\n"
        "Every hyper-parameter that a gin file or `--gin 'module.Component.field = value'` can set. Written by"
        " `python -m jaxrl_llm.tools.pages.bindings > docs/reference/bindings.md`; edit the docstrings, not this page.\n"
    )
    between = (
        "## Fields that several components have\n\nThey are set of the component, as `grpo.GRPO.kl_coef` is of"
        " `PolicyGradient.kl_coef` here.\n"
    )
    listed = components()
    bases = shared(listed)
    said = {b.name: b.meaning for component in listed for b in bindings(component)}
    sections = [[section(component, bases) for component in part] for part in (listed, bases)]
    return "\n".join([opening, macros.section(GIN, said), *sections[0], between, *sections[1]])


if __name__ == "__main__":
    print(page(), end="")
