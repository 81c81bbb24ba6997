"""Compares two evaluations on the same prompts: python -m jaxrl_llm.eval.compare RESULTS_A RESULTS_B

The folders hold the answers of two models, samplers or settings. On the prompts that both answered, it prints the mean score of each
and the mean of the paired differences with its 95% interval (1.96 standard errors over prompts). Several responses to a prompt are
averaged first.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.eval.answered import KINDS, Estimate, estimate, mean, value
from jaxrl_llm.eval.results import SAMPLES


def scores(folder: Path, kind: str, part: str = "") -> dict[str, float]:
    """Returns {prompt id: mean score of its responses of one kind, NaN where none was graded}.

    Raises:
      FileNotFoundError: `folder` is not an evaluation's folder.
      ValueError: a line is not a record, or the reward has no such part.
    """
    file = folder / SAMPLES
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no {SAMPLES}: give two folders that evaluations wrote (OUT_DIR)")
    found: dict[str, list[float]] = defaultdict(list)
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            if record["kind"] == kind:
                found[record["id"]].append(value(record, part))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file}:{number} is no record of an evaluation ({error!r})") from error
    return {prompt: mean(values) for prompt, values in found.items()}


def compare(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Estimate, Estimate, Estimate]:
    """Estimates a, b and b - a over the prompts that have a score in both."""
    shared = sorted(a.keys() & b.keys())
    pairs = np.array([(a[p], b[p]) for p in shared], np.float64).reshape(-1, 2)
    pairs = pairs[~np.isnan(pairs).any(axis=1)]
    return estimate(pairs[:, 0]), estimate(pairs[:, 1]), estimate(pairs[:, 1] - pairs[:, 0])


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.compare", __doc__)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--part", default="", help="a part of the reward (default: its total)")
    given = parser.parse_args(argv)
    compared = 0
    for kind in KINDS:
        a, b = (scores(folder, kind, given.part) for folder in (given.a, given.b))
        first, second, change = compare(a, b)
        if not change.n:
            continue
        compared += 1
        within = abs(change.mean) <= change.ci95
        print(
            f"{kind}: {first.mean:.4f} and {second.mean:.4f} on {change.n} prompts; difference {change.mean:+.4f} +- {change.ci95:.4f}"
            f" ({'within' if within else 'outside'} its 95% interval); {len(a) - change.n} and {len(b) - change.n} prompts left out"
        )
    if not compared:
        raise ValueError(f"{given.a} and {given.b} have no graded prompt in common")
    return 0


if __name__ == "__main__":
    sys.exit(main())
