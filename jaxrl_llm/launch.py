"""Runs what a gin file names: python -m jaxrl_llm.launch --gin_file=gin/quickstart.gin [--gin='GROUP_SIZE=16'] [--dry_run].

The gin file binds RUN to a component with a `run(config)` method.
"""

import argparse
import contextlib
import dataclasses
import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_llm import command_line
from jaxrl_llm.distributed import compilation_cache, memory, topology, xla_flags

_log = logging.getLogger(__name__)


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
        "--topology",
        metavar="NAME",
        help="with --dry_run: compile for this target, which need not be attached: v6e:16x16, v5p:4x4x4, h200:8 ...",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes, found by JAX (TPU pod, Slurm, JobSet); not needed where JAX_COORDINATOR_ADDRESS is set",
    )
    parser.add_argument(
        "--resume_as_new",
        action="store_true",
        help="go on from the checkpoint although settings differ that bend what was learned; noted in RUN_DIR/changes.jsonl",
    )
    parser.add_argument("--debug", action="store_true", help="show the stack of every error")
    return parser.parse_args(argv)


def prepare(target: str | None = None) -> None:
    """Sets up the process for a run, before JAX is imported: XLA's flags, memory, the compilation cache, and what the console shows of the log.

    Args:
      target: the target that programs are compiled for, as `topology.prepare` takes it; None is this machine.

    Raises:
      ValueError: the target is unknown.
      ImportError: its compiler is not installed.
    """
    if target is None:
        xla_flags.apply()
        if xla_flags.on_cpu():
            memory.keep()
    else:
        topology.prepare(target)
    compilation_cache.keep()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers loads tokenizers, without PyTorch
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)  # messages of lower levels go to the run's log
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[console])


@contextlib.contextmanager
def _uncollected(alone: bool) -> Iterator[None]:
    """Suspends garbage collection while modules are imported and a run is built, where the process is `alone`.

    The objects that are left live until the process ends, so later collections skip them.
    """
    if not alone:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _carry_out(run: Any, config: str, distributed: bool) -> int:
    """Runs `run` in one process, or together with the processes of other hosts; returns the exit code."""
    from jaxrl_llm.distributed import rendezvous

    place = rendezvous.coordinator_arguments(os.environ, distributed)
    limits = getattr(run, "hosts", None)
    if limits is None:
        if place is not None:
            raise ValueError(
                f"{type(run).__name__} runs in one process: unset JAX_NUM_PROCESSES, leave out --distributed"
            )
        return run.run(config) or 0
    with rendezvous.joined(limits, place) as processes:
        return run.run(config, processes)


def _as_new(run: Any) -> Any:
    """Returns the run, set to take up its new settings at a resume; raises ValueError where RUN is no train.Run."""
    if not hasattr(run, "resume_as_new"):
        raise ValueError(f"{type(run).__name__} is no training run: leave out --resume_as_new")
    return dataclasses.replace(run, resume_as_new=True)


def _beforehand(run: Any, distributed: bool) -> None:
    """Lets the sampler start what must run before JAX takes a device; processes that join others have none of that."""
    begin = getattr(getattr(run, "sampler", None), "before_devices", None)
    if begin is not None and not several(distributed):
        begin()


def several(distributed: bool) -> bool:
    """Returns whether this is one of several processes, which must join before they look at their devices."""
    from jaxrl_llm.distributed import rendezvous

    return rendezvous.coordinator_arguments(os.environ, distributed) is not None


def built(files: Sequence[str], bindings: Sequence[str], distributed: bool = False) -> tuple[Any, str]:
    """Builds as `command_line.build`; where rows are 'auto', prints the settings chosen for this device and adds them to the configuration."""
    run, config = command_line.build(files, bindings)
    packings = [getattr(stage, "packing", None) for stage in getattr(run, "stages", ())]
    if not any(getattr(packing, "rows", None) == "auto" for packing in packings):
        return run, config
    if several(distributed):
        raise ValueError(
            "rows = 'auto' is chosen by one process for its devices, and this run has several: set ROWS to what `python -m "
            "jaxrl_llm.tools.plan --fit` prints"
        )
    from jaxrl_llm.tools import fit

    chosen = fit.bindings_of(run, config)
    print("\n".join(["rows = 'auto' takes for this device:", *(f"  {line}" for line in chosen)]), flush=True)
    return command_line.build(files, [*bindings, *chosen])


def told_fit(run: Any, config: str, starting: bool = False) -> bool:
    """Returns whether a run fits this device by the memory account; where it does not, prints what would fit.

    A run that starts is refused only where its state alone is too large, since activations are an estimate.
    """
    from jaxrl_llm.tools import fit

    found = fit.verdict(run, config, fit.here())
    if found is None:
        return True
    goes = starting and not found.certain
    print(f"{'warning' if goes else 'error'}: {found.text}", file=sys.stderr, flush=True)
    return goes


def main(argv: Sequence[str] | None = None, *, alone: bool = False) -> int:
    """Builds the run and runs it; returns the exit code.

    Args:
      argv: the arguments; None takes those of the process.
      alone: whether the process does nothing else, as where it takes its own arguments.
    """
    arguments = parse_arguments(argv)
    from jaxrl_llm.protocols import Down

    try:
        if arguments.topology is not None and not arguments.dry_run:
            raise ValueError("--topology compiles for devices that are not here: add --dry_run, or leave it out to run")
        prepare(arguments.topology)
        alone = alone or argv is None
        with _uncollected(alone):
            run, config = built(arguments.gin_file, arguments.gin, arguments.distributed)
        if alone and "jaxrl_llm.rewards.services.hf_classifier" not in sys.modules:
            # For a tokenizer alone, transformers would import PyTorch, where it is installed, into JAX's process.
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        if arguments.resume_as_new:
            run = _as_new(run)
        if arguments.dry_run:
            from jaxrl_llm.tools.planning.run_plan import on_target

            lines = on_target(run, arguments.topology)
            print(next(lines), flush=True)
            if arguments.topology is None and not told_fit(run, config):
                return 1
            for line in lines:
                print(line, flush=True)
        else:
            _beforehand(run, arguments.distributed)
            if not several(arguments.distributed) and not told_fit(run, config, starting=True):
                return 1
            return _carry_out(run, config, arguments.distributed)
    except (*command_line.EXPECTED, Down) as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if arguments.debug or not memory.ran_out(error):
            raise
        print(
            f"error: {memory.advice(error, 'its programs were compiled' if arguments.dry_run else 'it ran')}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    command_line.leave(main())
