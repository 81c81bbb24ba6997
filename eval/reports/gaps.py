"""Prints how much sampler and learner differed over complete runs, token by token: `python -m jaxrl_llm.eval.reports.gaps RUN...`.

Each run folder gets a histogram of the sizes of the difference between the learner's log-prob and the sampler's, over all tokens that the
run compared (the metrics gap/compared, gap/differing and gap/above_*). In the bitwise mode it has one bar, for no difference.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm import command_line
from jaxrl_llm.eval.reports import jobs

WIDTH = 40  # characters of the longest bar
SAME = "no bit differs"
ABOVE = "gap/above_"  # prefix of the counts of tokens that differ by more than a size


def histogram(found: Sequence[jobs.Row]) -> dict[str, int]:
    """Returns {size of the difference: tokens} over the rows of a run, from none to the largest.

    Raises:
      ValueError: no row counts tokens.
    """
    sizes = {name.removeprefix(ABOVE) for row in found for name in row if name.startswith(ABOVE)}
    edges = sorted(sizes, key=float)
    names = ("gap/compared", "gap/differing", *(ABOVE + edge for edge in edges))
    above = [sum(int(row[name]) for row in found if name in row) for name in names]
    if not above[0]:
        raise ValueError(
            "no step compared tokens: their count, gap/compared, is in runs that sample with a policy whose log-probs are scored"
        )
    labels = [
        SAME,
        f"to {edges[0]}",
        *(f"{low} to {high}" for low, high in itertools.pairwise(edges)),
        f"above {edges[-1]}",
    ]
    return dict(zip(labels, [more - less for more, less in zip(above, [*above[1:], 0])], strict=True))


def drawn(bars: dict[str, int]) -> str:
    """Returns the histogram as text, with one line per bar."""
    most = max(bars.values())
    lines = [f"{label:>16} {count:>12,} {'#' * -(-WIDTH * count // most)}" for label, count in bars.items()]
    return "\n".join(line.rstrip() for line in lines)


@command_line.told
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.reports.gaps", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    for run in parser.parse_args(arguments).runs:
        bars = histogram(jobs.rows(run))
        total = sum(bars.values())
        print(f"{run}: tokens compared {total}, differing {total - bars[SAME]}\n{drawn(bars)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
