"""A run of seconds for the tests of whole runs: the quickstart with a smaller model and fewer steps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

BINDINGS = {
    "SFT_STEPS": 3,
    "STEPS": 5,
    "SAVE_EVERY": 2,
    "EVALUATE_EVERY": 2,
    "PROMPTS_PER_STEP": 4,
    "GROUP_SIZE": 4,
    "MINIBATCHES": 2,
    "ROWS": 8,
    "TRAIN_ROWS": 64,
    "sft/packing.Packing.rows": 8,
    "sft/stages.Stage.prompts_per_step": 16,
    "sft/stages.Stage.evaluate_every": 2,
    "heldout/sorting.Sorting.size": 8,
    "qwen3.Qwen3.width": 32,
    "qwen3.Qwen3.layers": 2,
    "qwen3.Qwen3.heads": 2,
    "qwen3.Qwen3.kv_heads": 1,
    "qwen3.Qwen3.head_width": 16,
    "qwen3.Qwen3.mlp_width": 64,
}


def bindings(run_dir: Path, **more: Any) -> list[str]:
    """gin bindings of the tiny run; `more` overrides them."""
    values = {**BINDINGS, "RUN_DIR": repr(str(run_dir)), **more}
    return [f"{name}={value}" for name, value in values.items()]


def command(run_dir: Path, *extra: str, gin_file: str = "gin/quickstart.gin", **more: Any) -> list[str]:
    """The launch command a user would type."""
    flags = [f"--gin={b}" for b in bindings(run_dir, **more)]
    return [sys.executable, "-m", "jaxrl_llm.launch", f"--gin_file={gin_file}", *flags, *extra]


def environment() -> dict[str, str]:
    """One CPU device, as a laptop has."""
    return {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def launch(
    run_dir: Path, *extra: str, gin_file: str = "gin/quickstart.gin", **more: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        command(run_dir, *extra, gin_file=gin_file, **more),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl holds, without what a clock decides."""
    found = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.append(
            {n: v for n, v in row.items() if not n.startswith(("time/", "speed/", "sampler/", "compilations"))}
        )
    return found
