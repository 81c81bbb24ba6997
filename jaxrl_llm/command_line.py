"""Code that all commands share: it builds a run from gin files, keeps the lines of help texts, and prints errors in one line.

Only this module imports gin, inside a function: other code is plain Python.
"""

import argparse
import difflib
import functools
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jaxrl_llm

Given = ParamSpec("Given")
Found = TypeVar("Found")

_log = logging.getLogger(__name__)
PACKAGE = Path(jaxrl_llm.__file__).resolve().parent

# gin modules of earlier versions, and where their classes are now. This goes together with tools/migrate.py, one version later.
MOVED: dict[str, dict[str, str]] = {
    "jaxrl_llm.stages": {"Stage": "jaxrl_llm.train.Stage"},
    "jaxrl_llm.optimizers": {"Optimizer": "jaxrl_llm.train.Optimizer"},
    "jaxrl_llm.packing": {"Packing": "jaxrl_llm.train.Packing"},
    "jaxrl_llm.mesh": {"MeshConfig": "jaxrl_llm.train.MeshConfig"},
    "jaxrl_llm.hosts": {"Hosts": "jaxrl_llm.train.Hosts"},
    "jaxrl_llm.checkpoint": {"Checkpointing": "jaxrl_llm.train.Checkpointing"},
    "jaxrl_llm.watch": {"Watch": "jaxrl_llm.train.Watchdog"},
    "jaxrl_llm.console": {"Console": "jaxrl_llm.train.Console"},
    "jaxrl_llm.metrics": {name: f"jaxrl_llm.train.{name}" for name in ("Jsonl", "TensorBoard", "WandB")},
    "jaxrl_llm.prometheus": {"Prometheus": "jaxrl_llm.train.Prometheus"},
    "jaxrl_llm.collect": {"Varied": "jaxrl_llm.train.DynamicSampling"},
    "jaxrl_llm.loading": {"Model": "jaxrl_llm.train.TrainedModel"},
    "jaxrl_llm.experience": {"SamplingSettings": "jaxrl_llm.experience.SamplingParams"},
    "jaxrl_llm.algorithms.bupo": {"BuPO": "jaxrl_llm.train.BuPO"},
    "jaxrl_llm.algorithms.token_buncher": {
        "TokenBuncher": "jaxrl_llm.train.TokenBuncher",
        "TokenNoiser": "jaxrl_llm.algorithms.token_noiser.TokenNoiser",
    },
    "jaxrl_llm.models.policy_source": {"PolicySource": "jaxrl_llm.models.sources.PolicySource"},
    "jaxrl_llm.models.value_source": {"ValueSource": "jaxrl_llm.models.sources.ValueSource"},
    "jaxrl_llm.hf_reward_model": {
        name: f"jaxrl_llm.models.reward_models.{name}" for name in ("HFRewardModel", "HFPairs")
    },
    "jaxrl_llm.hf_moderation": {"Moderation": "jaxrl_llm.models.reward_models.Moderation"},
    "jaxrl_llm.samplers.vllm_sampler": {"VllmSampler": "jaxrl_llm.samplers.vllm.VllmSampler"},
    "jaxrl_llm.samplers.vllm_server": {"LocalServers": "jaxrl_llm.samplers.vllm.LocalServers"},
    "jaxrl_llm.samplers.discovery": {"Discovery": "jaxrl_llm.samplers.vllm.Discovery"},
    "jaxrl_llm.environments.calculator": {"Calculator": "jaxrl_llm.rollouts.environments.Calculator"},
}

# Errors that a user can mend: one line says what to do, and a stack trace would hide it.
EXPECTED = (ValueError, OSError, FloatingPointError, TimeoutError, ImportError, MemoryError)


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m jaxrl_llm.MODULE`."""
    keeps = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m jaxrl_llm.{module}", description=description, formatter_class=keeps)


def told(main: Callable[Given, Found]) -> Callable[Given, Found | int]:
    """Wraps `main` so that it prints an expected error and returns the exit code 1 instead of raising it."""

    @functools.wraps(main)
    def run(*args: Given.args, **options: Given.kwargs) -> Found | int:
        try:
            return main(*args, **options)
        except EXPECTED as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return run


def ended(main: Callable[[], object]) -> None:
    """Calls a `main` that returns no exit code, and exits with 1 where an expected error ends it."""
    if told(main)() == 1:
        raise SystemExit(1)


def load_gin() -> Any:
    """Imports gin-config; raises ImportError where it is absent, or where a folder named gin is found in its place."""
    try:
        import gin
    except ImportError as error:
        raise ImportError("gin-config is not installed: pip install gin-config") from error
    if not hasattr(gin, "parse_config_files_and_bindings"):
        raise ImportError("`import gin` finds a folder named gin and not gin-config: pip install gin-config")
    return gin


def build(files: Sequence[str], bindings: Sequence[str] = ()) -> tuple[Any, str]:
    """Builds the component that the files bind to RUN; returns it and the whole configuration as gin text.

    Raises:
      ValueError: a binding is unknown, or a value or a file is missing; the message names it.
    """
    gin = load_gin()
    gin.clear_config(clear_constants=True)
    gin.add_config_file_search_path(str(PACKAGE))
    files = [str(Path(f) / "config.gin") if Path(f).is_dir() else f for f in files]
    try:
        gin.parse_config_files_and_bindings(files, list(bindings))  # finalizing refuses values that are still required
        run, config = gin.get_configurable("RUN/gin.macro")(), gin.config_str(max_line_length=120)
    except (ValueError, TypeError, NameError, AttributeError, SyntaxError, OSError, RuntimeError, ImportError) as error:
        raise ValueError(_old_names(files, bindings) or _explain(error, files)) from error
    for name in _unread(bindings, config):
        known = sorted(set(re.findall(r"%([A-Z]\w*)", config)))
        near = difflib.get_close_matches(name, known, n=1)
        _log.warning(
            "nothing reads %s here%s", name, f": is {near[0]} meant?" if near else ", the binding changes nothing"
        )
    return run, config


def moved_selectors() -> dict[str, str]:
    """{"stages.Stage": "train.Stage", ...}: the names that gin files of earlier versions use, and those of today."""
    last = lambda path, parts: ".".join(path.split(".")[-parts:])  # noqa: E731
    return {f"{last(module, 1)}.{name}": last(new, 2) for module, names in MOVED.items() for name, new in names.items()}


def _old_names(files: Sequence[str], bindings: Sequence[str]) -> str:
    """What to do where a file, or a binding of the command line, uses a name of an earlier version; "" where none does."""
    moved = moved_selectors()
    pattern = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, moved))})\b")
    texts = [(file.removesuffix("/config.gin"), Path(file).read_text()) for file in files if Path(file).is_file()]
    for where, text in [*texts, *(("--gin", binding) for binding in bindings)]:
        for number, line in enumerate(text.splitlines(), start=1):
            if (found := pattern.search(line.partition("#")[0])) is None:
                continue
            new = moved[found[1]]
            if where == "--gin":
                return f"--gin={text} names {found[1]}, which is {new} now"
            return (
                f"{where} line {number} names {found[1]}, which is {new} now: "
                f"`python -m jaxrl_llm.tools.migrate {where}` rewrites the file"
            )
    return ""


def _unread(bindings: Sequence[str], config: str) -> list[str]:
    """The macros among the bindings that no other binding refers to, since gin accepts any name."""
    names = [found[1] for text in bindings if (found := re.match(r"([A-Z]\w*)\s*=", text.strip()))]
    return [name for name in names if name != "RUN" and not re.search(rf"%{name}\b", config)]


def _explain(error: Exception, files: Sequence[str]) -> str:
    """gin's error message on one line, without the internals that gin adds to it."""
    text = " ".join(str(error).split()).partition(" in config string:")[0]
    if "RUN" in text and "macro" in text.lower() and "bound" in text:
        return f"{', '.join(files)} does not bind RUN: include gin/base.gin or set RUN = @train.Run()"
    return text
