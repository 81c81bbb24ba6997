"""math-verify in processes: values on published cases; time-outs, errors and dead processes are invalid, not wrong."""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxrl_llm.experience import Scores
from jaxrl_llm.rewards.maths import Maths, delimited, judge
from jaxrl_llm.rewards.services import pool
from jaxrl_llm.rewards.services.pool import Failed, Pool

Score = Callable[..., Scores]


@pytest.fixture(scope="module")
def maths() -> Iterator[Maths]:
    reward = Maths(workers=1, limit_s=20.0)
    yield reward
    reward.close()


def test_there_is_a_process_for_each_core_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, processes in ((1, 2), (6, 6), (64, 16)):
        monkeypatch.setattr(pool, "cores", lambda cores=cores: cores)
        assert Pool(workers=None, limit_s=1.0).workers == processes


def test_equal_expressions_score_1(score: Score, maths: Maths) -> None:
    texts = [r"so $x = \boxed{\frac{1}{2}}$", "it is 0.5", r"$\boxed{0.51}$", "no idea", "", r"\boxed{\frac{2}{4}}"]
    scores = score(maths, texts, r"\frac{1}{2}")
    assert scores.parts["maths"].tolist() == [1, 1, 0, 0, 0, 1]
    assert scores.valid["maths"].all()
    assert score(maths, [r"$2\pi$", "$2$", r"\boxed{(1,2)}"], r"2\pi").parts["maths"].tolist() == [1, 0, 0]


def test_a_reference_that_is_no_expression_is_invalid(score: Score, maths: Maths) -> None:
    assert score(maths, ["5"], "").valid["maths"].tolist() == [False]


def test_a_restated_problem_is_no_answer_where_only_boxes_count() -> None:
    cut = "To evaluate $(1+2i)6-3i$, we need to"
    strict = Maths(boxed_only=True)
    assert judge("6+9i", Maths().judged(cut)) == 1  # equal to the answer, and no answer
    assert judge("6+9i", strict.judged(cut)) == 0
    assert judge("6+9i", strict.judged(cut + r" get \boxed{9i+6}, not $7$")) == 1


def test_bare_latex_is_delimited_and_plain_numbers_are_left() -> None:
    assert [delimited(e) for e in (r"2\pi", "1,234", " $x$ ", r"\boxed{4}", "(1,2)")] == [
        r"$2\pi$",
        "1,234",
        "$x$",
        r"\boxed{4}",
        "$(1,2)$",
    ]


def test_math_verifys_published_cases_are_reproduced(real_data: Path, score: Score, maths: Maths) -> None:
    lines = (real_data / "graders" / "math_verify_cases.jsonl").read_text().splitlines()
    plain = {"file", "test", "gold", "pred", "expected"}  # the others set options of math-verify
    cases = [case for case in map(json.loads, lines) if set(case) == plain][::4]
    outcome: Counter[bool] = Counter()
    for case in cases:
        scores = score(maths, [case["pred"]], case["gold"])
        outcome[bool(scores.valid["maths"][0]) and scores.parts["maths"][0] == case["expected"]] += 1
    # "1,22" is read as the set {1, 22} here, and the versions of math-verify differ on answers with line ends.
    assert len(cases) == 59 and outcome[True] >= 57


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sleeping() -> Pool:
    return Pool(workers=1, limit_s=0.4)


def test_a_call_past_its_limit_fails_and_its_process_is_replaced() -> None:
    async def run() -> tuple[int, int]:
        pool = sleeping()
        before = await pool.call("os", "getpid")
        began = time.monotonic()
        with pytest.raises(Failed, match=r"no answer within 0.4 s"):
            await pool.call("time", "sleep", 60)
        assert time.monotonic() - began < 5
        assert not alive(before)
        after = await pool.call("os", "getpid")
        pool.close()
        assert not alive(after)
        return before, after

    before, after = asyncio.run(run())
    assert before != after and os.getpid() not in (before, after)


def test_errors_and_dead_processes_concern_one_call() -> None:
    async def run() -> None:
        pool = sleeping()
        with pytest.raises(Failed, match=r"ValueError: .*'x'"):
            await pool.call("builtins", "int", "x")
        with pytest.raises(Failed, match=r"ended during the call"):
            await pool.call("os", "_exit", 3)
        with pytest.raises(Failed, match=r"TypeError: .*JSON serializable"):
            await pool.call("importlib", "import_module", "os")
        assert await pool.call("builtins", "int", "7") == 7
        pool.close()
        assert await pool.call("builtins", "int", "8") == 8  # a closed pool starts again when it is asked
        pool.close()

    asyncio.run(run())


def test_memory_beyond_the_limit_is_a_failure_of_the_call() -> None:
    async def run() -> None:
        pool = Pool(workers=1, limit_s=20.0, memory_gb=1.0)
        with pytest.raises(Failed, match=r"MemoryError"):
            await pool.call("builtins", "bytearray", 2 * 2**30)
        pool.close()

    asyncio.run(run())


def test_a_response_that_never_ends_is_invalid_and_the_others_are_scored(score: Score) -> None:
    reward = Maths(workers=2, limit_s=3.0)
    try:
        scores = score(reward, [r"\boxed{5}", r"$\boxed{9^{9^{9^{9}}}!}$", "4"], "5")
    finally:
        reward.close()
    assert scores.valid["maths"].tolist() == [True, False, True]
    assert scores.parts["maths"].tolist()[::2] == [1, 0]


def test_bad_limits_are_errors_at_construction() -> None:
    with pytest.raises(ValueError, match=r"workers of a verifier's processes must be > 0 \(got 0\)"):
        Maths(workers=0)
