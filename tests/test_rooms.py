"""The rooms of the package: one order of imports, no circles, few names at the top, and what may be loaded where."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module imports its own room and rooms further right. The words are the files at the top of the package.
ORDER = (
    "interface", "launch", "tools", "train", "eval", "metrics", "rollouts", "environments", "agents", "samplers", "learner", "models", "algorithms", "kernels", "data",
    "rewards", "distributed", "publication", "words",
)  # fmt: skip
WORDS = {"__init__", "launch", "command_line", "components", "experience", "mistakes", "protocols", "serving"}
# Rooms that only meet in train: who samples does not know who learns, an algorithm sees log-probs and never who made them.
STRANGERS = (
    {"rollouts", "samplers"}, {"rollouts", "learner"}, {"samplers", "learner"}, {"models", "algorithms"}, {"eval", "learner"},
    {"agents", "samplers"}, {"agents", "learner"}, {"environments", "learner"}, {"environments", "samplers"}, {"eval", "samplers"}, {"eval", "algorithms"}, {"kernels", "data"}, {"kernels", "rewards"},
)  # fmt: skip
# Rooms whose files are the members of one family, in any number.
FAMILIES = ("algorithms", "data", "data.prepare", "rewards", "environments", "eval", "models")
MODULES_OF_A_FOLDER = 14
FACES = ("train", "samplers.embedded", "samplers.vllm", "samplers.sglang")

# Distributions that parts of the package must not import, not even inside a function.
HOST_ONLY = ("jax", "jaxlib", "flax", "optax", "orbax")
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "data": (*HOST_ONLY, "torch"),
    "rewards": HOST_ONLY,
    "agents": HOST_ONLY,
    "environments": HOST_ONLY,
    "words": ("jax", "flax", "torch", "transformers"),
    "algorithms": ("flax", "transformers"),
    "publication": (*HOST_ONLY, "gin", "transformers"),
}
MAY_IMPORT_GIN = ("command_line",)


def modules() -> dict[str, Path]:
    """Module name inside the package ("models.policy", "" for the package itself) -> file."""
    found = {}
    for folder, prefix in (("jaxrl_llm", ()), *((n, (n,)) for n in ("kernels", "data", "eval"))):
        for file in (ROOT / folder).rglob("*.py"):
            parts = (*prefix, *file.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(parts).removesuffix("__init__").removesuffix(".")] = file
    return found


MODULES = modules()
OLD_NAMES = (
    "samplers.vllm_plugin",
    "samplers.vllm_route",
    "samplers.vllm.proxy",
)  # what is started by them is told the new ones


def room(module: str) -> str:
    """The room that a module is in; the files at the top are words, but launch."""
    first = module.partition(".")[0]
    if first in ORDER:
        return first
    assert module == first and (first or "__init__") in WORDS, f"jaxrl_llm.{module} is in no room: see ORDER"
    return "words"


def imports(file: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import, those inside functions too."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = ["jaxrl_llm", *filter(None, package.split("."))]
                base = ".".join([*kept[: len(kept) - node.level + 1], *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def own_module(name: str) -> str | None:
    """The module of the package that an absolute dotted name reaches, or None for another distribution."""
    head, _, rest = name.partition(".")
    if head != "jaxrl_llm":
        return None
    while rest and rest not in MODULES and not any(m.startswith(f"{rest}.") for m in MODULES):
        rest = rest.rpartition(".")[0]
    return rest


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_to_the_own_room_or_further_right(module):
    own = ORDER.index(room(module))
    for line, name in imports(MODULES[module], module):
        if (target := own_module(name)) is None:
            continue
        where = f"jaxrl_llm.{module}:{line} imports jaxrl_llm.{target}"
        assert ORDER.index(room(target)) >= own, f"{where}: {room(target)} is left of {room(module)} in ORDER"
        assert {room(module), room(target)} not in STRANGERS, f"{where}: {room(module)} knows no {room(target)}"


def edges() -> dict[str, set[str]]:
    """Which modules each module imports at any place, under TYPE_CHECKING and inside functions too."""
    found: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        targets = {own_module(name) for _, name in imports(file, module)} - {None, module}
        found[module] = {str(target) for target in targets}
    return found


def test_no_circle_between_modules():
    state: dict[str, int] = {}
    graph = edges()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if state.get(module) == 2:
            return
        assert state.get(module) != 1, f"a circle: {' -> '.join((*path[path.index(module) :], module))}"
        state[module] = 1
        for target in sorted(graph[module]):
            visit(target, (*path, module))
        state[module] = 2

    for module in sorted(graph):
        visit(module, ())


def test_the_top_of_the_package_holds_the_words_alone():
    assert {file.stem for file in (ROOT / "jaxrl_llm").glob("*.py")} == WORDS


def test_folders_can_be_taken_in_at_a_glance():
    folders: dict[str, list[str]] = {}
    for module, file in MODULES.items():
        if file.name != "__init__.py" and module not in OLD_NAMES:
            folders.setdefault(module.rpartition(".")[0], []).append(module)
    for folder, held in folders.items():
        if folder not in FAMILIES:
            assert len(held) <= MODULES_OF_A_FOLDER, f"jaxrl_llm.{folder} holds {len(held)} modules"


def test_each_room_has_a_folder_of_tests():
    """A file at the top has its tests at the top of tests/."""
    for name in ORDER[:-1]:
        assert list((ROOT / "tests" / name).glob("test_*.py")), f"tests/{name}/ is to hold the tests of {name}"


def test_an_init_holds_a_docstring_and_a_face_imports_alone():
    for module, file in MODULES.items():
        if file.name != "__init__.py" or module == "":
            continue
        body = ast.parse(file.read_text()).body[1:]
        if module in FACES:
            kinds = [type(node) for node in body]
            assert set(kinds[:-1]) <= {ast.ImportFrom} and kinds[-1] is ast.Assign, f"{file} hands on classes alone"
        else:
            assert not body, f"{file} holds code"


def rooms_of(page: Path) -> list[tuple[str, str]]:
    """The rows of a page's table of rooms: a place and what it holds."""
    table = page.read_text().partition("| room | what it holds |\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", table, re.MULTILINE)


def test_readme_and_architecture_map_the_rooms_by_their_own_sentences():
    rows = rooms_of(ROOT / "docs" / "explanation" / "architecture.md")
    assert rooms_of(ROOT / "README.md") == rows
    mapped = dict(rows)
    rooms = [place.removeprefix("jaxrl_llm/").partition("/")[0].partition(".")[0] for place in mapped]
    assert tuple(dict.fromkeys(rooms)) == (*ORDER[:-1], "*", "gin")
    for module, file in MODULES.items():
        place = f"jaxrl_llm/{module.replace('.', '/')}/"
        if file.name == "__init__.py" and place in mapped:
            assert ast.get_docstring(ast.parse(file.read_text())).partition("\n")[0] == mapped[place], place


def test_gin_files_import_faces_members_of_families_and_experience_alone():
    for file in (ROOT / "gin").rglob("*.gin"):
        for package, name in re.findall(r"^from (jaxrl_llm[\w.]*) import (\w+)", file.read_text(), re.MULTILINE):
            module = f"{package}.{name}".removeprefix("jaxrl_llm.")
            family = module.rpartition(".")[0]
            assert module in (*FACES, "experience") or family in (*FAMILIES, "samplers", "rollouts"), (
                f"{file.relative_to(ROOT)} imports {module}"
            )


TEXTS = [
    file
    for pattern in ("*.md", "docs/**/*.md", "launch/*", "gin/**/*.gin", ".ci/*", "pyproject.toml")
    for file in sorted(ROOT.glob(pattern))
    if file.is_file() and file.name != "CHANGELOG.md"
]


@pytest.mark.parametrize("file", [*TEXTS, *MODULES.values()], ids=lambda file: str(file.relative_to(ROOT)))
def test_dotted_names_in_texts_resolve(file):
    for found in re.findall(r"\bjaxrl_llm((?:\.\w+)+)", file.read_text()):
        name = found[1:]
        if (
            file.name in ("command_line.py", "migrate.py")
            or name.startswith(("gin", "algorithms.mine", "tar.gz"))
            or name.endswith(".NAME")
        ):
            continue
        module = own_module(f"jaxrl_llm.{name}") or ""
        rest = name.removeprefix(module).removeprefix(".").partition(".")[0]
        known = module and (
            not rest or re.search(rf"\b{rest}\b", MODULES[module].read_text()) if module in MODULES else not rest
        )
        assert known or rest.startswith("__"), f"{file.relative_to(ROOT)} names jaxrl_llm.{name}, which is not there"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_rooms_import_only_the_distributions_they_may(module):
    for line, name in imports(MODULES[module], module):
        head = name.partition(".")[0]
        assert head not in FORBIDDEN.get(room(module), ()), f"jaxrl_llm.{module}:{line} imports {head}"
        assert head != "gin" or module in MAY_IMPORT_GIN, f"jaxrl_llm.{module}:{line}: only command_line imports gin"


# Import names that differ from their distributions' names (with - for _).
DISTRIBUTIONS = {"gin": "gin-config", "google": "protobuf", "orbax": "orbax-checkpoint", "IPython": "ipython"}


# The benchmark runs peers where they happen to be installed, the learning table has a plot where matplotlib is, and the
# modules of a vLLM server and of verifiers' worker are loaded by them.
OPTIONAL = {
    "kernels.peers": {"liger-kernel", "cut-cross-entropy", "torch"},
    "eval.reports.learning_table": {"matplotlib"},
    "environments.verifiers_worker": {"verifiers", "renderers"},
    "publication.vllm_plugin": {"vllm"},
    "publication.vllm_route": {"vllm", "starlette"},
}


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for e in extras for line in project["optional-dependencies"][e]]
    return {line.partition(">")[0].partition("[")[0] for line in lines}


def test_every_imported_distribution_is_declared():
    known = declared("serve", "search", "wandb", "trackio", "mlflow", "datasets", "plot", "notebook")
    for module, file in sorted(MODULES.items()):
        for line, name in imports(file, module):
            head = name.partition(".")[0]
            distribution = DISTRIBUTIONS.get(head, head.replace("_", "-"))
            ours = head == "jaxrl_llm" or head in sys.stdlib_module_names
            allowed = known | OPTIONAL.get(module, set())
            assert ours or distribution in allowed, (
                f"jaxrl_llm.{module}:{line}: declare {distribution} in pyproject.toml"
            )


def loaded_after_importing(names: list[str], without: tuple[str, ...] = ()) -> set[str]:
    """Distributions loaded by importing `names` where those of `without` cannot be imported."""
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    program = (
        f"import sys; {blocked}import {', '.join(names)}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def held_by(*rooms: str) -> list[str]:
    """Modules of some rooms; launch is a command."""
    held = [m for m in sorted(MODULES) if room(m) in rooms and not m.endswith("__main__") and m not in OLD_NAMES]
    return [f"jaxrl_llm.{m}" if m else "jaxrl_llm" for m in held]


def test_rooms_without_jax_load_where_jax_cannot_be_imported():
    loaded_after_importing(
        held_by("words", "data", "rewards", "agents", "environments", "publication"),
        without=("jax", "jaxlib", "flax", "optax"),
    )


def test_the_proxy_loads_on_a_sampler_s_host_which_has_no_jax():
    without = ("jax", "jaxlib", "flax", "optax", "orbax", "gin", "transformers")
    loaded_after_importing(["jaxrl_llm.samplers.vllm_proxy"], without=without)


def test_publication_loads_where_no_other_room_can():
    others = tuple(f"jaxrl_llm.{name}" for name in ORDER if name not in ("publication", "words"))
    loaded_after_importing(held_by("publication"), without=(*others, "jax", "flax", "gin"))


def test_importing_the_package_loads_nothing_else():
    assert not loaded_after_importing(["jaxrl_llm"]) & {"jax", "numpy", "gin", "flax", "transformers"}
