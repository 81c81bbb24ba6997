"""Code that all commands share: it builds a run from gin files, makes parsers that keep help texts' lines, and prints errors in one line.

Only this module imports gin, inside a function: other code is plain Python.
"""

import argparse
import functools
import logging
import os
import re
import sys
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import click

from jaxrl_llm import mistakes
from jaxrl_llm.mistakes import PACKAGE

Given = ParamSpec("Given")
Found = TypeVar("Found")
WORDS = "jaxrl_llm.words"  # in a verb's context: whether it takes files and settings before its options


# gin modules of earlier versions, and where their classes are now. This map and tools/migrate.py are removed together, one version later.
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
    "jaxrl_llm.rollouts.environments": {"Calculator": "jaxrl_llm.environments.calculator.Calculator"},
}

# Errors that a user can correct: one line says what to do, and a stack trace would hide it.
GIN_ERRORS = (
    ValueError, TypeError, NameError, AttributeError, SyntaxError, OSError, RuntimeError, ImportError, tokenize.TokenError
)  # fmt: skip
EXPECTED = (ValueError, OSError, FloatingPointError, TimeoutError, ImportError, MemoryError)


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `python -m jaxrl_llm.MODULE`, which names the verb of `jaxrl` instead where that calls it."""
    keeps = argparse.RawDescriptionHelpFormatter
    verb = click.get_current_context(silent=True)
    name = f"python -m jaxrl_llm.{module}" if verb is None else verb.command_path
    usage = f"{name} [FILE]... [NAME=VALUE]... [OPTIONS]" if verb is not None and verb.meta.get(WORDS) else None
    return argparse.ArgumentParser(prog=name, usage=usage, description=description, formatter_class=keeps)


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


def leave(code: int) -> NoReturn:
    """Ends the process; at once where programs are still being compiled in the background, for which nobody waits any longer."""
    ahead = sys.modules.get("jaxrl_llm.distributed.ahead")
    if ahead is not None and ahead.busy():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # an exit would join the compiler's threads
    sys.exit(code)


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
      ValueError: a binding is unknown, has a wrong type or is read by nothing, or a value or a file is missing; the message names it.
    """
    gin = load_gin()
    gin.clear_config(clear_constants=True)
    if str(PACKAGE) not in gin.config._LOCATION_PREFIXES:
        gin.add_config_file_search_path(str(PACKAGE))
    files = [str(Path(f) / "config.gin") if Path(f).is_dir() else f for f in files]
    for binding in bindings:
        if wrong := mistakes.malformed(binding):
            raise ValueError(wrong)
    try:
        given = _parse(gin, files, bindings)
        run, config = gin.get_configurable("RUN/gin.macro")(), gin.config_str(max_line_length=120)
    except GIN_ERRORS as error:
        raise ValueError(_old_names(files, bindings) or explained(gin, error)) from error
    if wrong := mistakes.not_read(gin, given):
        raise ValueError(wrong)
    return run, config


def _parse(gin: Any, files: Sequence[str], bindings: Sequence[str]) -> dict[mistakes.Bound, str]:
    """Parses the files and then the bindings, and refuses what gin accepts silently: other types, and macros that nothing reads.

    Returns what the bindings set, as `mistakes.bound`.
    """
    quiet = lambda record: not record.getMessage().startswith("Path not found: ")  # noqa: E731
    # gin logs an error for each folder that lacks an included file, before it looks in the next one.
    root = logging.getLogger()
    root.addFilter(quiet)
    try:
        parsed = [gin.parse_config_file(file) for file in files]
        given: dict[mistakes.Bound, str] = {}
        for binding in bindings:
            given |= mistakes.bound(gin, binding)
    finally:
        root.removeFilter(quiet)
    found = mistakes.sources(parsed, bindings, gin.config._LOCATION_PREFIXES)
    if ("RUN", "gin.macro") not in gin.config._CONFIG:
        raise ValueError(f"{', '.join(files)} does not bind RUN: include gin/base.gin or set RUN = @train.Run()")
    if wrong := mistakes.unread(found) or mistakes.wrong_type(gin) or mistakes.not_set(gin):
        raise ValueError(wrong)
    gin.finalize()
    return given


def moved_selectors() -> dict[str, str]:
    """Returns {"stages.Stage": "train.Stage", ...}: names in gin files of earlier versions, and their present names."""
    last = lambda path, parts: ".".join(path.split(".")[-parts:])  # noqa: E731
    return {f"{last(module, 1)}.{name}": last(new, 2) for module, names in MOVED.items() for name, new in names.items()}


def _old_names(files: Sequence[str], bindings: Sequence[str]) -> str:
    """Returns what to do where a file, or a binding of the command line, uses a name of an earlier version; "" where none does."""
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


def explained(gin: Any, error: Exception) -> str:
    """Returns gin's error message on one line, with the place and the nearest names and without the internals that gin adds to it."""
    text = str(error).partition(" in config string:")[0]
    in_file = re.search(r'\n\s+In file "(.*?)", line (\d+)(?:\n\s+([^\n]+))?', text)
    in_binding = re.search(r"\n\s+In bindings string line \d+\n\s+([^\n]+)", text)
    line = in_file[3] if in_file else in_binding[1] if in_binding else None
    where = f"{in_file[1]} line {in_file[2]}: " if in_file else f"--gin={line}: " if line else ""
    said = re.split(r"\n\s+(?:In file|In bindings string|In call to configurable|Failed to parse token)", text)[0]
    said = " ".join(said.split())
    if found := re.match(r"No bindings specified for '(\w+)/gin.macro'", said):
        known = [scope for scope, selector in gin.config._CONFIG if selector == "gin.macro"]
        return f"{where}%{found[1]} is read and not set{mistakes.nearest(found[1], known)}"
    if found := re.match(r"No configurable matching(?: reference)? '@?([\w./]+)(?:\(\))?'", said):
        return where + mistakes.unknown_component(found[1])
    if found := re.match(r"'([\w.]+)' was not provided by an import statement", said):
        full = re.search(rf"\b{re.escape(found[1])}\.(\w+)", line or "")
        return where + mistakes.unknown_component(f"{found[1]}.{full[1]}" if full else found[1])
    if found := re.match(r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", said):
        return where + mistakes.unknown_parameter(gin, found[1], found[2])
    if found := re.match(r"\w+\.__init__\(\) missing .* arguments?: '(\w+)'", said):
        kind = re.search(r"<class '(?:[\w.]+\.)?(\w+\.\w+)'>", text)
        name = f"{kind[1]}.{found[1]}" if kind else found[1]
        return f"{name} is not set: it has no default; docs/reference/bindings.md says what it takes"
    if line and "=" in line and (wrong := mistakes.malformed(line.strip())):
        return where + wrong.removeprefix(f"--gin={line.strip()}: ")
    return where + said
