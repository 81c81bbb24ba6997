"""Finds mistakes in gin files and bindings, and says what was got, what is allowed, the nearest names and an example."""

import ast
import difflib
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jaxrl_llm
from jaxrl_llm.components import FACES

PACKAGE = Path(jaxrl_llm.__file__).resolve().parent
COMPONENT = re.compile(r"^(?:class|def) ([A-Za-z]\w*)", re.MULTILINE)
# gin's references, `@scope/module.Component()`, and a binding's key, `scope/module.Component.parameter`.
REFERENCE = re.compile(r"@(?:\w+/)*(\w+)\.(\w+)")
KEY = re.compile(r"^\s*(?:\w+/)*(\w+)\.(\w+)(?:\.\w+)?\s*[:=]", re.MULTILINE)
MACRO = re.compile(r"^([A-Za-z_]\w*)\s*=", re.MULTILINE)
READ = re.compile(r"%([A-Za-z_]\w*)")
REQUIRED = "%gin.REQUIRED"  # how gin writes a value that another file or the command line must set
SINGLE = re.compile(r"\s*([\w./]+)\s*=\s*(.*)\Z", re.DOTALL)
Bound = tuple[str, str, str]  # scope, component with its module's full path, parameter


@dataclass(frozen=True)
class Source:
    """Text that sets bindings.

    Attributes:
      name: the file, or "--gin".
      text: its text.
      component: whether it is one of the package's component files (gin/FOLDER/NAME.gin), whose macros other files may read.
    """

    name: str
    text: str
    component: bool = False


def sources(files: Iterable[Any], bindings: Sequence[str], prefixes: Sequence[str]) -> list[Source]:
    """Returns the texts of parsed files (gin's tree of includes), innermost first, and of the bindings after them.

    Args:
      files: what gin returns for each file, with `filename` and `includes`.
      bindings: texts of the command line.
      prefixes: folders in which gin looks for files.
    """
    found: list[Source] = []
    for parsed in files:
        found += sources(parsed.includes, (), prefixes)
        places = (Path(prefix, parsed.filename) for prefix in prefixes)
        if (file := next((place for place in places if place.is_file()), None)) is not None:
            folder = file.resolve().parent
            found.append(Source(str(file), file.read_text(), folder.parent == (PACKAGE / "gin").resolve()))
    return found + [Source("--gin", binding) for binding in bindings]


def unread(found: Sequence[Source]) -> str:
    """Returns an error message for a macro that nothing reads; "" where there is none.

    It skips a run's own config.gin, whose macros were read when it was made.
    """
    texts = {source: re.sub(r"(?m)#.*$", "", source.text) for source in found}
    read = {name for text in texts.values() for name in READ.findall(text)}
    for source, text in texts.items():
        if source.component or Path(source.name).name == "config.gin":
            continue
        for name in MACRO.findall(text):
            if name not in read and name != "RUN":
                number = next(i for i, line in enumerate(text.splitlines(), 1) if re.match(rf"{name}\s*=", line))
                where = f"--gin={text}" if source.name == "--gin" else f"{source.name} line {number}"
                return f"{where}: nothing reads {name} here{nearest(name, read)}"
    return ""


def nearest(name: str, known: Iterable[str], also: str = "") -> str:
    """Returns "; is A or B meant?" for the names that come closest, regardless of case; else `also`."""
    by_case = {other.casefold(): other for other in sorted(known)}
    close = difflib.get_close_matches(name.casefold(), by_case, n=3, cutoff=0.7)
    return f"; is {' or '.join(by_case[c] for c in close)} meant?" if close else also


def malformed(binding: str) -> str:
    """Returns what is wrong with the form of a binding of the command line, with an example; "" where it can be read."""
    if "\n" in binding.strip():
        return ""
    parts = SINGLE.match(binding)
    if parts is None:
        return f"--gin={binding}: a binding is NAME=VALUE, such as --gin=GROUP_SIZE=8"
    name, value = parts[1], parts[2].strip()
    return f"--gin={binding}: {problem}" if (problem := _no_literal(name, value)) else ""


def _no_literal(name: str, value: str) -> str:
    """Returns an error message for a value that is neither a Python literal nor made of references; "" for one that is."""
    plain = re.sub(r"[@%][\w./]+(?:\(\))?", "None", value)
    try:
        ast.literal_eval(plain)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        bare = value.strip("'\"")
        if re.fullmatch(r"(?:\w+/)*\w+\.[A-Z]\w*(?:\(\))?", value):
            example = f"a component is @{value.removesuffix('()')}()"
        elif bare.casefold() in ("true", "false", "none"):
            example = f"it is written {bare.capitalize()}"
        elif value and not re.search(r"[\[\](){},]", value):
            example = f"a text needs quotes: {name}={bare!r}" + (
                f', in a shell --gin="{name}={bare!r}"' if "'" not in bare else ""
            )
        else:
            example = f"such as {name}=8, {name}='text' or {name}=['a', 'b']"
        return f"{value or 'nothing'} is no value of gin; {example}"
    return ""


# -- components by name ------------------------------------------------------------------------------------------------


@cache
def modules() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Returns {"grpo": ((module, names of its classes and functions), ...)} of the package, from its files, without importing them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for folder, folders, files in os.walk(PACKAGE, followlinks=True):
        folders[:] = sorted(f for f in folders if f not in ("tools", "services", "prepare", "__pycache__"))
        for file in sorted(f for f in files if f.endswith(".py")):
            path = Path(folder, file)
            parts = ("jaxrl_llm", *path.relative_to(PACKAGE).with_suffix("").parts)
            name = ".".join(parts).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            names = re.findall(r'"(\w+)"', text.partition("__all__")[2]) if name in FACES else COMPONENT.findall(text)
            if path.name != "__init__.py" or name in FACES:
                found.setdefault(name.rpartition(".")[2], []).append((name, " ".join(names)))
    return {alias: tuple(held) for alias, held in found.items()}


def importing(alias: str, component: str) -> str:
    """Returns the statement that imports `alias`, a module of the package that holds `component`; "" where there is none."""
    for module, names in modules().get(alias, ()):
        if component in names.split():
            return f"from {module.rpartition('.')[0]} import {alias}"
    return ""


def with_imports(gin: Any, binding: str) -> str:
    """Adds imports to a binding of the command line, for components that no file imports; they are found by their modules' names."""
    named = dict.fromkeys((*KEY.findall(binding), *REFERENCE.findall(binding)))
    imported = gin.config._IMPORTS
    formats = {statement.format() for statement in imported}
    registry = gin.config._REGISTRY  # it holds what a file named, and what earlier files of this process did
    known = lambda alias, name: registry.matching_selectors(f"{alias}.{name}")  # noqa: E731
    lines = {pair: importing(*pair) for pair in named}
    if all(not line or (line in formats and known(*pair)) for pair, line in lines.items()):
        return binding
    imports = {statement.bound_name(): statement.format() for statement in imported}
    imports |= {alias: line for (alias, _), line in lines.items() if line}
    needed = dict.fromkeys(imports[alias] for alias, _ in named if alias in imports)
    return "\n".join(["from __gin__ import dynamic_registration", *needed, binding])


def bound(gin: Any, binding: str) -> dict[Bound, str]:
    """Parses a binding of the command line; returns {(scope, component, parameter): its text} of what it binds, without macros."""
    config = gin.config._CONFIG
    before = dict(config)
    config.clear()  # what is here afterwards is the binding's, an equal value included
    try:
        gin.parse_config(with_imports(gin, binding))
    finally:
        own = dict(config)
        config.clear()
        config.update(before)
        for key, parameters in own.items():
            config.setdefault(key, {}).update(parameters)
    return {(*key, name): binding for key, held in own.items() if key[1] != "gin.macro" for name in held}


def not_read(gin: Any, given: Mapping[Bound, str]) -> str:
    """Returns an error message for the first binding of the command line that the built run has not read; "" where it read all.

    Bindings of files are not checked, since files set what several variants of a run build.
    """
    built: dict[str, list[str]] = {}
    for scope, selector in gin.config._OPERATIVE_CONFIG:
        built.setdefault(selector, []).append(scope)
    # A function that a component is given uncalled, as @maths.final_answer, is called later.
    called_later = {f.selector for f in _references(list(gin.config._CONFIG.values())) if not f.evaluate}
    for (scope, selector, name), text in given.items():
        deciding = {_deciding(gin, place, selector, name) for place in built.get(selector, ())}
        if scope in deciding or selector in called_later:
            continue
        said = f"--gin={text}: nothing reads {_written(scope, selector)}.{name} here"
        if selector not in built:
            room = selector.split(".")[1] if selector.startswith("jaxrl_llm.") else ""
            kin = sorted({_written("", s) for s in built if s.startswith(f"jaxrl_llm.{room}.") and room != "train"})
            also = f"; of {room} it builds {', '.join(kin)}" if kin else ""
            return f"{said}: the run builds no {_written('', selector)}{also}"
        inside = {place for place in deciding if place is not None and (not scope or place.startswith(f"{scope}/"))}
        if nearer := sorted(f"{_written(place, selector)}.{name}" for place in inside):
            return f"{said}: {' and '.join(nearer)} {'is' if len(nearer) == 1 else 'are'} set, and nearer; set that"
        return f"{said}: the run builds {', '.join(sorted(_written(place, selector) for place in built[selector]))}"
    return ""


def _deciding(gin: Any, place: str, selector: str, name: str) -> str | None:
    """Returns the scope whose binding a component built in the scope `place` takes: the innermost that has one; None without any."""
    parts = place.split("/") if place else []
    scopes = ("/".join(parts[:count]) for count in range(len(parts), -1, -1))
    return next((scope for scope in scopes if name in gin.config._CONFIG.get((scope, selector), {})), None)


def _written(scope: str, selector: str) -> str:
    """Returns a component's name as gin files write it: scope/module.Component."""
    return "/".join(filter(None, (scope, ".".join(selector.split(".")[-2:]))))


def _references(value: Any) -> Iterator[Any]:
    """Yields the references to components that a bound value holds."""
    if isinstance(value, Mapping | list | tuple):
        for item in [*value.keys(), *value.values()] if isinstance(value, Mapping) else value:
            yield from _references(item)
    elif hasattr(value, "selector") and hasattr(value, "evaluate"):
        yield value


def unknown_component(selector: str) -> str:
    """Returns an error message for a component that does not exist or is not imported."""
    alias, _, name = selector.rpartition("/")[2].rpartition(".")
    if line := importing(alias, name):
        return f"{selector} is not imported: add `{line}` to the file"
    known = {f"{a}.{n}" for a, held in modules().items() for _, names in held for n in names.split()}
    listed = sorted(n for _, names in modules().get(alias, ()) for n in names.split() if n[0].isupper())
    also = f"; {alias} has {', '.join(listed)}" if listed else "; docs/reference/bindings.md lists the components"
    return f"there is no component {selector}{nearest(selector, known, also)}"


def unknown_parameter(gin: Any, selector: str, name: str) -> str:
    """Returns an error message for a parameter that a component does not have."""
    found = gin.config._REGISTRY.get_match(selector)
    try:
        known = list(inspect.signature(found.wrapped).parameters) if found else []
    except (ValueError, TypeError):
        known = []
    also = f"; it has {', '.join(known)}" if known else ""
    return f"{selector} has no {name!r}{nearest(name, known, also)}"


# -- types -------------------------------------------------------------------------------------------------------------


def wrong_type(gin: Any) -> str:
    """Returns an error message for the first literal that does not have its parameter's type; "" where all do."""
    config = gin.config._CONFIG
    for said, value, hint in _parameters(gin):
        literal, macro = value, ""
        while getattr(literal, "selector", "") == "gin.macro":
            macro = macro or literal.config_key[0]
            literal = config.get(literal.config_key, {}).get("value", literal.selector)
            if literal == "gin.macro":
                break
        if literal == "gin.macro" or fits(literal, hint):
            continue
        wanted = _example(literal, hint)
        shown = f"{macro}={literal!r} ({said})" if macro else f"{said}={literal!r}"
        return f"{shown} must be {told(hint)} (got {type(literal).__name__}){f', such as {macro or said}={wanted}' if wanted else ''}"
    return ""


def not_set(gin: Any) -> str:
    """Returns an error message for the values that files require and nothing sets, with types and examples; "" where there are none."""
    held = list(_parameters(gin))
    missing = {said: (said, hint) for said, value, hint in held if repr(value) == REQUIRED}
    for (macro, selector), parameters in gin.config._CONFIG.items():
        if selector == "gin.macro" and repr(parameters.get("value")) == REQUIRED:
            missing[macro] = next(((said, hint) for said, value, hint in held if repr(value) == f"%{macro}"), ("", Any))
    lines = []
    for name, (said, hint) in missing.items():
        wanted = next((repr(x) for x in (8, 0.5, "...", True) if hint is not Any and fits(x, hint)), "")
        read_by = f" ({said})" if said and said != name else ""
        kind = f": {told(hint).removesuffix(' or None')}" if hint is not Any else ""
        lines.append(f"{name}{read_by} must be set{kind}{f', such as {name}={wanted}' if wanted else ''}")
    return "; ".join(lines)


def _parameters(gin: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, bound value, annotation) of each parameter that is bound, without macros."""
    for (scope, selector), parameters in gin.config._CONFIG.items():
        if selector == "gin.macro":
            continue
        hints = _hints(gin.config._REGISTRY[selector].wrapped)
        module, _, component = selector.rpartition(".")
        where = "/".join(filter(None, (scope, module.rpartition(".")[2])))
        for name, value in parameters.items():
            yield f"{where}.{component}.{name}", value, hints.get(name, Any)


def _hints(component: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the annotations of a component's parameters; empty where they cannot be resolved."""
    try:
        if isinstance(component, type):
            return {n: h for kind in reversed(component.__mro__) for n, h in typing.get_type_hints(kind).items()}
        return typing.get_type_hints(component)
    except (NameError, TypeError, AttributeError):
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a literal has the type `hint`; references, and hints other than the plain kinds, always fit."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if not isinstance(value, str | int | float | bool | None | list | tuple | dict):
        return True
    if hint is Any:
        return True
    if origin is Literal:
        return value in inner
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in inner)
    if hint in (int, float, str, bool, type(None)):
        return _is_plain(value, hint)
    kind = origin or hint
    if not isinstance(kind, type) or kind is object:
        return True  # Any, type variables and callables
    if issubclass(kind, Mapping):
        return isinstance(value, dict)
    if issubclass(kind, Sequence):
        items = inner[:1] if inner and (kind is not tuple or inner[-1] is Ellipsis) else ()
        return isinstance(value, list | tuple) and (not items or all(fits(x, items[0]) for x in value))
    return value is None  # a component, which no literal but None can replace


def _is_plain(value: Any, kind: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def told(hint: Any) -> str:
    """Returns a plain-English description of a type."""
    names = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in names:
        return names[hint]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(told(part) for part in inner))
    if origin is Literal:
        return f"one of {inner}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a dictionary"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list, each {told(inner[0])}" if inner else "a list"
    return f"a component of the kind {getattr(hint, '__name__', str(hint))}, written @module.Component()"


def _example(value: Any, hint: Any) -> str:
    """Returns a value that fits, close to the one that was got, in Python's spelling; "" where there is none."""
    tries: list[Any] = []
    if isinstance(value, str):
        try:
            tries.append(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            tries.append([value])
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        tries.append(int(value))
    tries += [[value], str(value), 8, 0.5, True]
    return next((repr(x) for x in tries if fits(x, hint)), "")
