"""The proofs' verdicts, from numbers whose outcome is known."""

import math
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.eval.reports import system_proofs as proofs


def run(curve: list[dict[str, float]], **fields: Any) -> dict[str, Any]:
    return {"before": curve[0], "after": curve[-1], "curve": curve, "seconds": 1.0, "entropy_after": 0.5, **fields}


def darling(classes: float, first: float, best: float) -> dict[str, Any]:
    return run([{"step": 0, "classes": 5, "pass@1": 0.4, "pass@16": 1.0}, {"step": 9, "classes": classes, "pass@1": first, "pass@16": best}])  # fmt: skip


def test_darling_needs_more_classes_at_equal_quality_on_every_seed() -> None:
    base = {0: darling(2, 0.95, 0.96), 1: darling(2, 0.95, 0.96)}
    good = {0: darling(4, 0.94, 1.0), 1: darling(3, 0.95, 1.0)}
    found = proofs.darling({"darling_maths": good, "darling_baseline": base})
    assert found is not None and found["reached"] and found["classes_ratio"] == [2.0, 1.5]
    worse = {0: darling(4, 0.90, 1.0), 1: darling(3, 0.93, 1.0)}
    found = proofs.darling({"darling_maths": worse, "darling_baseline": base})
    assert found is not None and not found["reached"]
    assert found["quality_difference_mean"] == pytest.approx(-0.035)
    few = {0: darling(4, 0.94, 1.0), 1: darling(2.9, 0.95, 1.0)}
    assert not (proofs.darling({"darling_maths": few, "darling_baseline": base}) or {})["reached"]
    assert proofs.darling({"darling_maths": good, "darling_baseline": {0: base[0]}}) is None


def test_the_interval_is_students() -> None:
    mean, half = proofs.interval([0.1, 0.2, 0.3])
    assert mean == pytest.approx(0.2) and half == pytest.approx(4.303 * 0.1 / math.sqrt(3))


def monitored(*points: tuple[float, float]) -> dict[str, Any]:
    curve = [{"behaviour": b, "monitor/rmse": r, "monitor/f1": 1 - r, "monitor/count": 500.0} for b, r in points]
    return run([{"step": float(i), **p} for i, p in enumerate(curve)])


def test_a_classmate_is_compared_where_behaviour_is_alike() -> None:
    base = {0: monitored((0.3, 0.6), (0.7, 0.7), (0.9, 0.8))}
    ours = {0: monitored((0.3, 0.6), (0.6, 0.5), (0.71, 0.4), (0.98, 0.3))}
    found = proofs.classmate({"classmate_cot": ours, "classmate_baseline": base})
    assert found is not None and found["behaviour"] == [[0.71, 0.7]] and found["reached"]
    assert found["rmse_lower_by"] == [pytest.approx(1 - 0.4 / 0.7)]
    apart = proofs.classmate({"classmate_cot": {0: monitored((0.3, 0.6), (0.5, 0.1))}, "classmate_baseline": base})
    assert apart is not None and not apart["reached"]


def test_a_run_is_summed_up_from_the_begin_of_its_last_stage() -> None:
    rows = [
        {"step": 0, "eval/heldout/sampled": 0.0},
        {"step": 1, "stage": 0.0, "time/step_s": 2.0},
        {"step": 2, "stage": 0.0, "time/step_s": 2.0, "eval/heldout/sampled": 0.3},
        {"step": 3, "stage": 1.0, "time/step_s": 3.0, "entropy": 2.0},
        {"step": 4, "stage": 1.0, "time/step_s": 3.0, "entropy": 1.0, "eval/heldout/sampled": 0.6},
    ]
    found = proofs.summary(rows)
    assert (found["before"]["sampled"], found["after"]["sampled"], found["seconds"]) == (0.3, 0.6, 10.0)
    assert (found["entropy_before"], found["entropy_after"], found["steps"]) == (2.0, 1.0, 4)


def test_every_run_stands_after_what_it_begins_from() -> None:
    jobs = proofs.jobs(["darling", "classmate", "cs336"], Path("/runs"), [])
    place = {job.name: i for i, job in enumerate(jobs)}
    assert len(place) == len(jobs)
    assert all(place[earlier] < place[job.name] for job in jobs for earlier in job.after)
    assert {job.name for job in jobs} >= {"darling_maths-2", "classmate_cot-0", "no_baseline-1", "off-policy_no_clip-2"}
    assert len(proofs.jobs(["darling"], Path("/runs"), [])) == 12


def test_tables_hold_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert proofs.write(tmp_path) == {"darling": None, "classmate": None}
    results = {
        "defaults": {0: run([{"step": 0, "sampled": 0.2, "greedy": 0.3}, {"step": 9, "sampled": 0.5, "greedy": 0.6}])}
    }
    table = proofs.markdown(results, {})
    assert "| defaults | `gin/cs336_grpo_tiny.gin` | 0.20 | 0.50 | 0.30 +- nan | 0.60 | 0.50 |" in table
