"""Measures how long a run takes from its launch to its first step, with an empty and with a filled compilation cache.

    python tests/measure_starts.py [--times 5] [--whole] [--checkout FOLDER]... [NAME=VALUE]...

For each checkout it starts the quickstart in a new process, `times` with a cache folder of its own and `times` with the folder that a
first start filled, ends it when the line of step 1 (of the last step with --whole) is printed, and prints medians and ranges of wall and
processor seconds, and the load of the machine. Checkouts take turns, so that what else the machine does bears on all of them.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


def start(checkout: Path, cache: Path, line: str, words: list[str]) -> tuple[float, float]:
    """Wall and processor seconds from the launch of the quickstart until it prints a line that begins so; Linux.

    Raises:
      RuntimeError: the run ended before that.
    """
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "jaxrl_llm.interface.commands", "train", "quickstart", *words]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            said = []
            for text in process.stdout:
                said.append(text)
                if text.startswith(line):
                    wall = time.perf_counter() - began
                    used = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                    process.kill()
                    return wall, (int(used[11]) + int(used[12])) / TICKS
    raise RuntimeError(f"{checkout} printed no line {line!r}:\n{''.join(said[-20:])}")


def told(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--whole", action="store_true", help="until the last step")
    parser.add_argument("--checkout", action="append", type=Path, help="default: this one; may be repeated")
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE")
    arguments = parser.parse_args()
    checkouts = [folder.resolve() for folder in arguments.checkout or [ROOT]]
    line = "trained to step" if arguments.whole else "step 1/"
    taken: dict[tuple[Path, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.times):
            for checkout in checkouts:
                cache = Path(folder) / str(checkouts.index(checkout))
                for kind in ("cold", "warm"):
                    if kind == "cold":
                        shutil.rmtree(cache, ignore_errors=True)
                    found = start(checkout, cache, line, arguments.words)
                    taken.setdefault((checkout, kind), []).append(found)
                    print(f"# {number} {checkout.name} {kind}: {found[0]:.1f} s wall, {found[1]:.1f} s CPU", flush=True)
    print("| checkout | cache | wall s, median (range) | CPU s, median (range) |\n|---|---|---|---|")
    for (checkout, kind), found in taken.items():
        commit = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        walls, used = map(list, zip(*found, strict=True))
        print(f"| {commit.stdout.strip() or checkout} | {kind} | {told(walls)} | {told(used)} |")
    print(
        f"# load of the last 15 minutes {os.getloadavg()[2]:.1f}, {os.cpu_count()} cores, medians of {arguments.times}"
    )


if __name__ == "__main__":
    main()
