"""pass@k and maj@k: expected results of k of n graded samples, over all choices of k.

    pass@k = 1 - C(n - c, k) / C(n, k)      c of the n samples correct (arXiv 2107.03374, equation 1)
    maj@k  = P(the most frequent answer of k samples drawn without replacement is the correct one), ties broken evenly

Both are exact expectations over subsets, computed in integers until the last division; sampling with replacement would
underestimate pass@k.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the probability that k of n samples, drawn without replacement, include one of the c correct ones.

    Raises:
      ValueError: 0 <= c <= n or 1 <= k <= n does not hold.
    """
    _check(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"pass@k needs 0 <= correct <= samples (got {c} of {n})")
    return 1 - comb(n - c, k) / comb(n, k)


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Returns the probability that the most frequent answer of k of the n samples is the correct one.

    Correct samples count as one answer, since each equals the reference; wrong ones are distinguished by their text. A wrong
    sample without an answer has no vote. Among equally frequent answers each wins with the same probability.

    Args:
      answers: n extracted answers; None where there is none.
      correct: n grades.
      k: number of samples drawn.

    Raises:
      ValueError: 1 <= k <= n does not hold.
    """
    n, right = len(answers), sum(map(bool, correct))
    _check(n, k)
    wrong = Counter(answer for answer, good in zip(answers, correct, strict=True) if not good and answer is not None)
    won = 0.0
    for votes in range(1, min(right, k) + 1):
        for tied, ways in _ways(n - right, wrong.values(), votes, k - votes).items():
            won += comb(right, votes) * ways / (tied + 1) / comb(n, k)
    return won


def powers_of_two(n: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, ... up to n, and n itself."""
    return tuple(sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n} - {0}))


def _ways(others: int, sizes: Iterable[int], votes: int, take: int) -> dict[int, int]:
    """Counts choices of `take` of the other samples in which no answer has more than `votes` votes.

    Returns:
      {number of other answers that reach `votes` too: number of choices}.
    """
    rivals = [size for size in sizes if size >= votes]
    free = others - sum(rivals)  # samples too rare to reach `votes`, or without a vote: any number of them may be drawn
    table: dict[tuple[int, int], int] = {(0, 0): 1}
    for size in rivals:
        grown: defaultdict[tuple[int, int], int] = defaultdict(int)
        for (used, tied), ways in table.items():
            for drawn in range(min(votes, take - used) + 1):
                grown[used + drawn, tied + (drawn == votes)] += ways * comb(size, drawn)
        table = grown
    found: defaultdict[int, int] = defaultdict(int)
    for (used, tied), ways in table.items():
        found[tied] += ways * comb(free, take - used)
    return found


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of samples (got k={k} of {n}): draw more samples")
