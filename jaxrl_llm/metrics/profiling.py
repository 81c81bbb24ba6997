"""Profiler traces for TensorBoard's profile tab (xprof), their summary in a few lines, and a counter of compiled programs.

`python -m jaxrl_llm.metrics.profiling FOLDER` prints the summary of the newest trace under a folder.
"""

import json
import math
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import command_line
from jaxrl_llm.distributed import ahead

EVENT = "/jax/core/compile/backend_compile_duration"  # JAX's name of the compilation of one program
# Numbers and launch suffixes in which copies of one kernel differ.
_NUMBERS = re.compile(r"([._]\d+)+$|(?<=_)\d+(?=_|$)")


@contextmanager
def traced(folder: Path, wanted: bool = True) -> Iterator[None]:
    """Traces the enclosed code, if `wanted`, into plugins/profile/ of a TensorBoard folder, and prints the longest kernels."""
    if not wanted:
        yield
        return
    with jax.profiler.trace(str(folder)):
        yield
    file = newest(folder)
    rows = summary(file, 5)
    longest = ", ".join(f"{row['kernel']} {row['share']:.0%}" for row in rows[:-1])
    print(f"traced into {file.parent}: {rows[-1]['ms']:g} ms of kernels, the longest {longest}", flush=True)


def newest(folder: Path) -> Path:
    """Returns the newest trace file under `folder`; raises FileNotFoundError where there is none."""
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise FileNotFoundError(
            f"no trace (*.xplane.pb) lies under {folder}: set PROFILE_STEPS (train.Run.profile_steps), or bench --profile"
        )
    return found[-1]


def summary(file: Path, most: int = 25) -> list[dict[str, Any]]:
    """Sums the device's time by kernel name and returns at most `most` kernels, longest first.

    Returns:
      Rows of {"kernel", "calls", "ms", "share"}; the last row, "all", holds the sum over all kernels.
    """
    calls: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for name, milliseconds in _kernels(file):
        short = _NUMBERS.sub("", name)
        calls[short] += 1
        spent[short] += milliseconds
    total = sum(spent.values())
    ordered = sorted(spent, key=lambda name: -spent[name])[:most]
    rows = [
        {"kernel": n, "calls": calls[n], "ms": round(spent[n], 3), "share": round(spent[n] / total, 4)} for n in ordered
    ]
    return [*rows, {"kernel": "all", "calls": sum(calls.values()), "ms": round(total, 3), "share": 1.0}]


def _kernels(file: Path) -> Iterator[tuple[str, float]]:
    """Yields (name, milliseconds) of every kernel of the first device; on a CPU, of every operation of its thread pool."""
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    devices = sorted(
        (p for p in planes if p.name.startswith("/device:") and "CUSTOM" not in p.name), key=lambda p: p.name
    )
    if devices:
        lines = list(devices[0].lines)
        chosen = [line for line in lines if line.name.startswith("Stream")]
        chosen = chosen or [line for line in lines if line.name == "XLA Ops"] or lines
    else:
        chosen = [line for p in planes if p.name == "/host:CPU" for line in p.lines if "XLA" in line.name]
    for line in chosen:
        for event in line.events:
            if not event.name.startswith(("ThunkExecutor", "end: ")):
                yield event.name, event.duration_ns / 1e6


class Compilations:
    """Counts the programs that XLA compiled since the last `take`, and their seconds; a process makes one, before the programs that it counts."""

    def __init__(self) -> None:
        self._made, self._seen = 0, 0
        self._spans: list[tuple[float, float]] = []
        self._lock = threading.Lock()  # programs are compiled in several threads
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        beside = threading.current_thread().name.startswith(ahead.THREADS)  # what is waited for is an event of its own
        if event in (EVENT, ahead.WAITED):
            end = time.perf_counter()
            with self._lock:
                self._made += event == EVENT
                if not beside:
                    self._spans.append((end - duration_secs, end))

    def take(self) -> int:
        """Returns the number of programs compiled since the last call."""
        new, self._seen = self._made - self._seen, self._made
        return new

    def spent(self) -> float:
        """Returns the seconds since the last call in which programs were compiled, or compiled ones read; those of several at a time count once,
        and of those in the background (distributed/ahead.py) the ones in which they were waited for."""
        with self._lock:
            spans, self._spans = self._spans, []
        seconds, until = 0.0, -math.inf
        for begin, end in sorted(spans):
            seconds += max(end - max(begin, until), 0.0)
            until = max(until, end)
        return seconds


def peak_memory() -> dict[str, float]:
    """Returns {"memory/peak_gib": the most that a device of this process has held since it started}; {} where the backend does not
    report it, as a CPU's."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    return {"memory/peak_gib": max(peaks) / 2**30} if peaks else {}


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("metrics.profiling", __doc__)
    parser.add_argument("folder", type=Path, help="folder of a run, or of bench --profile")
    for entry in summary(newest(parser.parse_args(argv).folder)):
        print(json.dumps(entry))
    return 0


if __name__ == "__main__":
    sys.exit(main())
