"""Imports go down only: what sits low in the table knows nothing of what sits above it."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the top down. A module may import its own layer and those below. A name ending in a dot is a whole folder.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "launch",
        "plan",
        "doctor",
        "bench",
        "bench_case",
        "hidden_states",
        "simulate",
        "memory",
        "export",
        "chat",
        "loading",
        "bindings_page",
    ),
    ("train", "stage_run", "stage_parts", "phase_run", "stages", "teaching", "feeds", "ahead", "cs336"),
    ("eval.",),
    (
        "diagnostics",
        "shown",
        "collect",
        "companions",
        "rollouts",
        "learner",
        "train_state",
        "hf_reward_model",
        "hf_moderation",
        "global_batch",
        "samplers.",
        "checkpoint",
        "tree_sums",
        "run_folder",
        "metrics",
        "console",
        "prometheus",
        "run_log",
        "watch",
        "event_files",
        "profiling",
        "compilations",
        "offload",
        "preemption",
        "together",
    ),
    ("models.", "algorithms.", "optimizers", "mesh", "packing", "hf_weights", "flops", "hosts"),
    ("kernels.", "masked", "batch"),
    ("data.", "rewards.", "environments."),
    (
        "experience",
        "protocols",
        "parts",
        "bounds",
        "command_line",
        "wire",
        "phases",
        "shapes",
        "xla_flags",
        "child_environment",
        "out_of_memory",
        "slow_clients",
        "",
    ),
)
WHERE = f"LAYERS in {Path(__file__).name}"

# Distributions that parts of the package must not import, not even inside a function.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "data.": ("jax", "jaxlib", "flax", "optax", "orbax", "torch"),
    "rewards.": ("jax", "jaxlib", "flax", "optax", "orbax"),
    "experience": ("jax", "flax", "torch", "transformers"),
    "protocols": ("jax", "flax", "torch", "transformers"),
    "algorithms.": ("flax", "transformers"),
    **{
        f"samplers.{module}": ("jax", "jaxlib", "flax", "optax", "orbax", "gin", "transformers")
        for module in (
            "manifest",
            "cuda_ipc",
            "object_store",
            "orbax_reader",
            "stager",
            "vllm_targets",
            "vllm_plugin",
            "vllm_engine",
        )
    },
}
MAY_IMPORT_GIN = ("launch",)
# Siblings that only meet in the layers above: an algorithm sees log-probs, never who made them.
STRANGERS = (
    ("algorithms.", "models."),
    ("algorithms.", "hf_weights"),
    ("models.", "algorithms."),
    ("kernels.", "data."),
    ("kernels.", "rewards."),
)


def modules() -> dict[str, Path]:
    """Module name inside the package ("models.policy", "" for the package itself) -> file."""
    found = {}
    for folder, prefix in (("jaxrl_llm", ()), *((n, (n,)) for n in ("kernels", "data", "eval"))):
        for file in (ROOT / folder).rglob("*.py"):
            parts = (*prefix, *file.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(parts).removesuffix("__init__").removesuffix(".")] = file
    return found


MODULES = modules()


def within(module: str, entry: str) -> bool:
    return f"{module}.".startswith(entry) if entry.endswith(".") else module == entry


def layer(module: str) -> int:
    for depth, entries in enumerate(LAYERS):
        if any(within(module, entry) for entry in entries):
            return depth
    pytest.fail(f"jaxrl_llm.{module} has no layer: name it in {WHERE}, as low as what it imports allows")


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
def test_imports_go_down_only(module):
    for line, name in imports(MODULES[module], module):
        target = own_module(name)
        if target is None:
            continue
        where = f"jaxrl_llm.{module}:{line} imports jaxrl_llm.{target}"
        assert layer(target) >= layer(module), f"{where}, which sits above it in {WHERE}"
        for importer, imported in STRANGERS:
            assert not (within(module, importer) and within(target, imported)), (
                f"{where}: {importer} knows no {imported}"
            )


@pytest.mark.parametrize("module", sorted(MODULES))
def test_parts_import_only_the_distributions_they_may(module):
    layer(module)
    for line, name in imports(MODULES[module], module):
        head = name.partition(".")[0]
        for part, forbidden in FORBIDDEN.items():
            assert not (within(module, part) and head in forbidden), f"jaxrl_llm.{module}:{line} imports {head}"
        assert head != "gin" or module in MAY_IMPORT_GIN, f"jaxrl_llm.{module}:{line}: only launch imports gin"


def test_entries_of_the_table_are_named_once():
    entries = [entry for entries in LAYERS for entry in entries]
    assert len(entries) == len(set(entries))


# Import names that differ from their distributions' names (with - for _).
DISTRIBUTIONS = {"gin": "gin-config", "google": "protobuf", "orbax": "orbax-checkpoint"}


# The benchmark runs peers where they happen to be installed, the learning table has a plot where matplotlib is, and the
# modules of a vLLM server are loaded by it.
OPTIONAL = {
    "kernels.peers": {"liger-kernel", "cut-cross-entropy", "torch"},
    "eval.learning_table": {"matplotlib"},
    "samplers.vllm_plugin": {"vllm"},
    "samplers.vllm_route": {"vllm", "starlette"},
    "samplers.vllm_engine": {"vllm"},
}


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for e in extras for line in project["optional-dependencies"][e]]
    return {line.partition(">")[0].partition("[")[0] for line in lines}


def test_every_imported_distribution_is_declared():
    known = declared("serve", "wandb", "datasets", "plot")
    for module, file in sorted(MODULES.items()):
        for line, name in imports(file, module):
            head = name.partition(".")[0]
            distribution = DISTRIBUTIONS.get(head, head.replace("_", "-"))
            ours = head == "jaxrl_llm" or head in sys.stdlib_module_names
            allowed = known | OPTIONAL.get(module, set())
            assert ours or distribution in allowed, (
                f"jaxrl_llm.{module}:{line}: declare {distribution} in pyproject.toml"
            )


HOST_ONLY = [m for m in sorted(MODULES) if any(within(m, p) for p in ("data.", "rewards.", "experience", "protocols"))]


def loaded_after_importing(names: list[str]) -> set[str]:
    program = f"import sys, {', '.join(names)}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_data_and_rewards_load_no_jax_even_indirectly():
    loaded = loaded_after_importing([f"jaxrl_llm.{m}" for m in HOST_ONLY])
    assert not loaded & {"jax", "jaxlib", "flax", "optax"}


def test_importing_the_package_loads_nothing_else():
    assert not loaded_after_importing(["jaxrl_llm"]) & {"jax", "numpy", "gin", "flax", "transformers"}


@pytest.mark.skipif("samplers.vllm_plugin" not in MODULES, reason="the vLLM plugin is not part of this checkout")
def test_the_vllm_plugin_loads_neither_jax_nor_flax_nor_gin():
    assert not loaded_after_importing(["jaxrl_llm.samplers.vllm_plugin", "jaxrl_llm.samplers.vllm_route"]) & {
        "jax",
        "jaxlib",
        "flax",
        "gin",
    }
