"""On a machine with GPUs: one process with two of them, and two processes with one each, give one run; a lost one ends the other.

    PYTHONPATH=$PWD python3 tests/gpu_hosts.py

prints a line for each of: a run of one process, the same run of two (largest relative difference of their losses, rewards and gradient
norms), the same run again with one process killed (exit status and seconds of the other), and its restart.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COMPARED = ("loss/total", "reward/mean", "grad_norm/policy", "entropy/mean")
BINDINGS = (
    "SFT_STEPS=4", "STEPS=12", "SAVE_EVERY=4", "EVALUATE_EVERY=8", "PROMPTS_PER_STEP=16", "MINIBATCHES=2", "TRAIN_ROWS=512",
    "heldout/sorting.Sorting.size=16", "train.Hosts.lost_s=10",
)  # fmt: skip


def start(run_dir: Path, count: int) -> list[subprocess.Popen[str]]:
    """`count` processes, which share the first two GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [f"--gin={b}" for b in (f"RUN_DIR='{run_dir}'", *BINDINGS)]
    command = [sys.executable, "-m", "jaxrl_llm.launch", "--gin_file=gin/quickstart.gin", *flags]
    started = []
    for i in range(count):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(i)}
        environment = {**os.environ, **place, "CUDA_VISIBLE_DEVICES": "0,1" if count == 1 else str(i)}
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        )
    return started


def finished(processes: list[subprocess.Popen[str]]) -> list[int]:
    """Exit statuses; the ends of what failed are printed."""
    for process in processes:
        _, said = process.communicate(timeout=400)
        if process.returncode:
            print("   ", process.returncode, said.strip().splitlines()[-1:], flush=True)
    return [process.returncode for process in processes]


def rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row for row in lines}


def difference(one: Path, two: Path) -> str:
    """Largest relative difference of what is compared, over all steps."""
    ours, theirs = rows(one), rows(two)
    worst = 0.0
    for step, row in ours.items():
        for name in set(COMPARED) & set(row):
            a, b = row[name], theirs[step][name]
            worst = max(worst, abs(a - b) / max(abs(a), 1e-3))
    return f"{len(theirs)} of {len(ours)} steps, largest relative difference {worst:.2g}"


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    one, two, lost = (folder / name for name in ("one", "two", "lost"))
    for run_dir, count in ((one, 1), (two, 2)):
        begin = time.monotonic()
        print(
            f"{count} process(es): exit {finished(start(run_dir, count))}, {time.monotonic() - begin:.0f} s", flush=True
        )
    print("one against two:", difference(one, two), flush=True)
    processes = start(lost, 2)
    while max(rows(lost), default=0) < 7 and all(p.poll() is None for p in processes):
        time.sleep(0.1)
    begin = time.monotonic()
    os.kill(processes[1].pid, signal.SIGKILL)
    print(f"process 1 killed: exit {finished(processes)}, the other after {time.monotonic() - begin:.0f} s", flush=True)
    print("restart: exit", finished(start(lost, 2)), difference(two, lost), flush=True)


if __name__ == "__main__":
    main()
