"""All faults, many times, as a table: `python -m tests.chaos [--seed 7] [--only sampler] [--short]`, from the root of the repository.

One fault, very often, on a machine that is busy: `python -m tests.chaos --only "sampler killed" --times 200 --load 3`.
"""

import argparse
import faulthandler
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent
LONGEST_S = 7200.0  # of one fault
# Keeps a core busy until whoever started it is gone.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of everything random; without it, the clock gives one")
    parser.add_argument("--only", action="append", help="faults whose name holds this; may be repeated")
    parser.add_argument("--short", action="store_true", help="as seldom as in the tests")
    parser.add_argument("--times", type=int, help="how often each is tried, in place of its own number")
    parser.add_argument("--load", type=int, default=0, help="processes that keep the machine busy meanwhile")
    parser.add_argument("--limit_s", type=float, default=14_400.0, help="no fault is begun after so many seconds")
    asked = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if asked.seed is None else asked.seed
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # PyTorch's threads wait for each other, half a minute on a busy machine
    sys.path[:0] = [
        str(TESTS.parent),
        *(str(TESTS / name) for name in ("", "chaos", "samplers", "publication", "rewards", "eval")),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:7])
    logging.disable(logging.CRITICAL)
    import jax  # noqa: F401  it is imported before anything that looks for it
    from all_faults import FAULTS
    from chaos_table import Row, Trial, table

    print(f"seed {seed}", flush=True)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(asked.load)]
    rows, failed, begin = [], 0, time.monotonic()
    for number, (name, (fault, short, many)) in enumerate(FAULTS.items()):
        times = short if asked.short else asked.times or many
        if not times or not any(part in name for part in asked.only or [""]):
            continue
        if time.monotonic() - begin > asked.limit_s:
            rows.append((name, Row(tried=0, outcome="NOT RUN: out of time")))
            failed += 1
            continue
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)  # nothing hangs: if it does, this says where
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = fault(Trial(folder=Path(folder), seed=seed + number, times=times))
                if row.into != row.out:
                    raise AssertionError(f"{row.into} went in and {row.out} came out")
            except Exception as error:
                failed += 1
                row = Row(
                    tried=times, outcome=f"FAILED (seed {seed + number}): {type(error).__name__}: {str(error)[:300]}"
                )
        rows.append((name, row))
        print(f"{time.monotonic() - begin:6.1f} s  {name}: {row.outcome}", flush=True)
    for process in busy:
        process.kill()
    print()
    print(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
