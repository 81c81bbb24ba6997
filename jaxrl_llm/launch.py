"""Runs what a gin file names: python -m jaxrl_llm.launch --gin_file=gin/quickstart.gin [--gin='GROUP_SIZE=16'] [--dry_run].

The gin file binds RUN to a component with a `run(config)` method. Only this module imports gin: other code is plain Python.
"""

import argparse
import difflib
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxrl_llm
from jaxrl_llm import command_line, out_of_memory, xla_flags
from jaxrl_llm.rewards.wrap import Down

_log = logging.getLogger(__name__)
PACKAGE = Path(jaxrl_llm.__file__).resolve().parent


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.parser("launch", __doc__)
    parser.add_argument(
        "--gin_file",
        action="append",
        required=True,
        metavar="FILE",
        help="gin file, or a run folder to go on from; may be repeated",
    )
    parser.add_argument(
        "--gin", action="append", default=[], metavar="BINDING", help="binding that overrides the files, such as SEED=1"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="print the resolved plan and the memory that it takes, and leave"
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes, found by JAX (TPU pod, Slurm, JobSet); not needed where JAX_COORDINATOR_ADDRESS is set",
    )
    parser.add_argument("--debug", action="store_true", help="show the stack of every error")
    return parser.parse_args(argv)


def load_gin() -> Any:
    """The gin-config module; raises ImportError where only the folder gin/ answers."""
    try:
        import gin
    except ImportError as error:
        raise ImportError("gin-config is not installed: pip install gin-config") from error
    if not hasattr(gin, "parse_config_files_and_bindings"):
        raise ImportError("`import gin` finds a folder named gin and not gin-config: pip install gin-config")
    return gin


def build(files: Sequence[str], bindings: Sequence[str] = ()) -> tuple[Any, str]:
    """The component that the files bind to RUN, and the whole configuration as gin text.

    Raises:
      ValueError: an unknown binding, a missing value or file; the message names it.
    """
    gin = load_gin()
    gin.clear_config(clear_constants=True)
    gin.add_config_file_search_path(str(PACKAGE))
    files = [str(Path(f) / "config.gin") if Path(f).is_dir() else f for f in files]
    try:
        gin.parse_config_files_and_bindings(files, list(bindings))  # finalizing refuses values that are still required
        run, config = gin.get_configurable("RUN/gin.macro")(), gin.config_str(max_line_length=120)
    except (ValueError, TypeError, NameError, AttributeError, SyntaxError, OSError, RuntimeError) as error:
        raise ValueError(_explain(error, files)) from error
    for name in _unread(bindings, config):
        known = sorted(set(re.findall(r"%([A-Z]\w*)", config)))
        near = difflib.get_close_matches(name, known, n=1)
        _log.warning(
            "nothing reads %s here%s", name, f": is {near[0]} meant?" if near else ", the binding changes nothing"
        )
    return run, config


def _unread(bindings: Sequence[str], config: str) -> list[str]:
    """Macros among the bindings that no other binding refers to: gin takes any name."""
    names = [found[1] for text in bindings if (found := re.match(r"([A-Z]\w*)\s*=", text.strip()))]
    return [name for name in names if name != "RUN" and not re.search(rf"%{name}\b", config)]


def _explain(error: Exception, files: Sequence[str]) -> str:
    """gin's message on one line, without what gin adds of its own internals."""
    text = " ".join(str(error).split()).partition(" in config string:")[0]
    if "RUN" in text and "macro" in text.lower() and "bound" in text:
        return f"{', '.join(files)} does not bind RUN: include gin/base.gin or set RUN = @train.Run()"
    return text


def _carry_out(run: Any, config: str, distributed: bool) -> int:
    """Runs it, in one process or together with those of other hosts; returns the exit code."""
    from jaxrl_llm import together

    place = together.place(os.environ, distributed)
    limits = getattr(run, "hosts", None)
    if limits is None:
        if place is not None:
            raise ValueError(
                f"{type(run).__name__} runs in one process: unset JAX_NUM_PROCESSES, leave out --distributed"
            )
        return run.run(config) or 0
    with together.joined(limits, place) as processes:
        return run.run(config, processes)


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the run and carries it out; returns the exit code."""
    arguments = parse_arguments(argv)
    xla_flags.apply()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it is used for tokenizers, without PyTorch
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)  # what is told at lower levels goes to the run's log
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[console])
    try:
        run, config = build(arguments.gin_file, arguments.gin)
        if argv is None and "jaxrl_llm.rewards.hf_classifier" not in sys.modules:
            # For a tokenizer alone, transformers would bring PyTorch, where it is installed, into JAX's process.
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        if arguments.dry_run:
            from jaxrl_llm.plan import peaks, plan

            print(plan(run), flush=True)
            for line in peaks(run):
                print(line, flush=True)
        else:
            return _carry_out(run, config, arguments.distributed)
    except (*command_line.EXPECTED, Down) as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if arguments.debug or not out_of_memory.ran_out(error):
            raise
        print(f"error: {out_of_memory.advice(error, 'it ran')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
