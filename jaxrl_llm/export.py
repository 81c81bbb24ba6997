"""Writes a run's policy as a Hugging Face folder: python -m jaxrl_llm.export RUN --out DIR [--step N | --best] [--dtype bfloat16]."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import launch
from jaxrl_llm.hf_weights import save
from jaxrl_llm.loading import Model
from jaxrl_llm.mesh import MeshConfig, Partitioner


def policy_of(run_dir: Path, *, step: int | None = None, best: bool = False) -> tuple[Any, Any, Any]:
    """The policy, its parameters and the tokenizer of a run's checkpoint, on this machine's devices.

    Args:
      run_dir: the run's folder, with its config.gin.
      step: the checkpoint's step; None takes the last one.
      best: take the best checkpoint by the run's evaluation metric.

    Raises:
      OSError: no such run or checkpoint.
      ValueError: a configuration that does not build.
    """
    if not (run_dir / "config.gin").is_file():
        raise FileNotFoundError(f"{run_dir} is no run folder: it has no config.gin")
    opened = Model(path=str(run_dir), step=step, best=best).open(Partitioner.create(MeshConfig()))
    return opened.policy, opened.params(), opened.tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.export", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the last)")
    parser.add_argument("--best", action="store_true", help="export the best checkpoint")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args(argv)
    try:
        if arguments.out.exists():
            raise FileExistsError(f"{arguments.out} exists: give a new folder")
        policy, params, tokenizer = policy_of(arguments.run, step=arguments.step, best=arguments.best)
        save(policy, params, arguments.out, tokenizer=tokenizer, dtype=arguments.dtype)
    except launch.EXPECTED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
