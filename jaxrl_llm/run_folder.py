"""The folder of a run or an evaluation, and what reproduces it: gin text, seed, version, commit, devices."""

import contextlib
import json
import subprocess
from pathlib import Path

import jax

import jaxrl_llm


def writable(run_dir: Path, macro: str = "RUN_DIR") -> Path:
    """The run's folder, made if need be; raises OSError that names the `macro` to set where it cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise OSError(
            f"the run folder {run_dir} cannot be written ({error.strerror}): set {macro} to a folder that can"
        ) from error
    return run_dir


def provenance(run_dir: Path, seed: int, config: str) -> None:
    """Writes what reproduces the run: gin text, seed, version and commit."""
    if config:
        (run_dir / "config.gin").write_text(config)
    facts = {
        "seed": seed,
        "version": jaxrl_llm.__version__,
        "commit": commit(),
        "jax": jax.__version__,
        "devices": [str(d) for d in jax.devices()],
    }
    (run_dir / "run.json").write_text(json.dumps(facts, indent=2) + "\n")


def commit() -> str | None:
    """The commit that the code is of, with "+changes" where files differ from it; None outside a git checkout."""
    here = Path(__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
        return _git(here, "rev-parse", "HEAD") + ("+changes" if changed else "")
    return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
