"""pass@k and maj@k against closed forms, subsets counted one by one, and graded samples of a real model."""

import json
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from jaxrl_llm.eval.maths import normalised
from jaxrl_llm.eval.pass_at_k import maj_at_k, pass_at_k, powers_of_two


def by_enumeration(answers, correct, k):
    """(pass@k, maj@k) over every subset of k samples, as fractions."""
    passed, majority, subsets = Fraction(0), Fraction(0), 0
    for subset in combinations(range(len(answers)), k):
        subsets += 1
        passed += any(correct[i] for i in subset)
        votes = Counter(
            "the gold" if correct[i] else answers[i] for i in subset if correct[i] or answers[i] is not None
        )
        top = [answer for answer, count in votes.items() if count == max(votes.values())]
        majority += Fraction(top.count("the gold"), len(top)) if top else 0
    return passed / subsets, majority / subsets


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        # 1 - C(6,4)/C(8,4) = 1 - 15/70; 1 - (125*124*...)/...; half of the halves hold the one
        (8, 2, 4, 1 - 15 / 70),
        (128, 3, 16, 1 - (112 * 111 * 110) / (128 * 127 * 126)),
        (256, 1, 128, 0.5),
        (32, 4, 4, 1 - (28 * 27 * 26 * 25) / (32 * 31 * 30 * 29)),
        (8, 8, 1, 1.0),
        (8, 0, 8, 0.0),
        (5, 3, 3, 1.0),
    ],
)
def test_pass_at_k_has_its_closed_forms(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-15)


def test_pass_at_1_is_the_share_of_correct_samples():
    assert [pass_at_k(7, c, 1) for c in range(8)] == pytest.approx([c / 7 for c in range(8)])


def test_both_are_the_mean_over_all_subsets():
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = int(rng.integers(1, 9))
        answers = [None if x == 0 else "abcd"[x - 1] for x in rng.integers(0, 5, n)]
        correct = [bool(rng.random() < 0.4) for _ in range(n)]
        for k in range(1, n + 1):
            passed, majority = by_enumeration(answers, correct, k)
            assert pass_at_k(n, sum(correct), k) == pytest.approx(float(passed), abs=1e-12)
            assert maj_at_k(answers, correct, k) == pytest.approx(float(majority), abs=1e-12)


def test_a_tie_is_shared_evenly_and_no_vote_loses():
    assert maj_at_k(["1", "2", "3"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert maj_at_k(["1", None, None], [True, False, False], 3) == 1.0
    assert maj_at_k([None, None], [False, False], 2) == 0.0


def test_maj_of_many_samples_agrees_with_drawing_them():
    rng = np.random.default_rng(1)
    answers = ["gold"] * 20 + ["a"] * 18 + ["b"] * 6 + [f"x{i}" for i in range(20)]
    correct = [a == "gold" for a in answers]
    draws, won = 20_000, 0.0
    for _ in range(draws):
        votes = Counter(answers[i] for i in rng.permutation(64)[:9])
        top = [a for a, c in votes.items() if c == max(votes.values())]
        won += top.count("gold") / len(top)
    share = won / draws
    assert maj_at_k(answers, correct, 9) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / draws))


def test_k_beyond_the_samples_is_refused():
    with pytest.raises(ValueError, match="between 1 and the number of samples"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="k=0"):
        maj_at_k(["1"], [True], 0)


def test_the_usual_ks_are_the_powers_of_two_and_all():
    assert powers_of_two(1) == (1,)
    assert powers_of_two(8) == (1, 2, 4, 8)
    assert powers_of_two(10) == (1, 2, 4, 8, 10)


def test_stored_grades_of_real_samples_give_their_known_means(real_data):
    rows = [json.loads(line) for line in (real_data / "graders" / "qwen_math_cot_100.jsonl").read_text().splitlines()]
    scores = np.array([row["score"] for row in rows])
    assert scores.shape == (100, 8)
    assert np.mean([pass_at_k(8, int(s.sum()), 1) for s in scores]) == pytest.approx(0.910)
    assert np.mean([pass_at_k(8, int(s.sum()), 8) for s in scores]) == np.mean(scores.any(1))
    ours, theirs = [], []
    for row in rows:
        answers = [normalised(p) if p else None for p in row["pred"]]
        ours.append(maj_at_k(answers, row["score"], 8))
        votes = Counter("gold" if good else a for a, good in zip(answers, row["score"], strict=True) if good or a)
        top = [a for a, c in votes.items() if c == max(votes.values())]
        theirs.append(top.count("gold") / len(top))
    assert ours == pytest.approx(theirs)
    assert np.mean(ours) > 0.910
    for k in (2, 4):
        subsets = [by_enumeration(row["pred"], row["score"], k) for row in rows]
        assert np.mean([pass_at_k(8, int(s.sum()), k) for s in scores]) == pytest.approx(
            float(np.mean([p for p, _ in subsets]))
        )
