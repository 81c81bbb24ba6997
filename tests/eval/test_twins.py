"""A twin counts as moved by its last stage's reward, or loss; those that others begin from come first."""

from pathlib import Path

import pytest

from jaxrl_llm.eval.reports import twins


def stage(number: int, **values: list[float]) -> list[dict[str, float]]:
    count = len(next(iter(values.values())))
    return [{"stage": number, **{n.replace("_", "/"): v[i] for n, v in values.items()}} for i in range(count)]


@pytest.mark.parametrize(
    ("rows", "measure", "moved"),
    [
        (stage(0, loss_total=[9.0, 1.0]) + stage(1, reward_mean=[0.1, 0.1, 0.2, 0.2]), "reward/mean", True),
        (stage(0, reward_mean=[0.1, 0.9]) + stage(1, reward_mean=[0.3, 0.9, 0.1, 0.31]), "reward/mean", False),
        (stage(0, reward_mean=[0.9, 0.2]), "reward/mean", True),
        (stage(0, reward_mean=[0.5, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6]), "reward/mean", False),  # within its noise
        (stage(0, reward_mean=[0.50, 0.51, 0.5, 0.5, 0.5, 0.5, 0.60, 0.61]), "reward/mean", True),
        (stage(0, loss_total=[2.0, 1.7]), "loss/total", True),
        (stage(0, loss_total=[2.0, 1.9]), "loss/total", False),
        (stage(0, loss_total=[2.0, float("nan")]), "loss/total", False),
    ],
)
def test_what_counts_as_moved(rows: list[dict[str, float]], measure: str, moved: bool) -> None:
    found = twins.moved([{"step": 0.0, "eval/heldout/greedy": 0.0}, *rows])
    assert (found["measure"], found["moved"]) == (measure, moved)


def test_a_twin_begins_from_an_exported_one() -> None:
    names = twins.names("classmate_cot")
    assert names == ["classmate_mate_tiny", "classmate_cot_tiny"]
    first, second = (twins.job(name, Path("/runs"), ["SEED=1"]) for name in names)
    assert [c[2] for c in first.commands] == ["jaxrl_llm.launch", "jaxrl_llm.tools.export"]
    assert second.after == ["classmate_mate_tiny"]
    assert "--gin=CLASSMATE='/runs/classmate_mate_tiny/model'" in second.commands[0]
    assert {"darling_maths_tiny", "cs336_grpo_tiny", "classmate_selfplay_tiny"} <= set(twins.names())


def test_a_twin_without_a_result_is_said_to_have_none() -> None:
    table = twins.markdown(
        [{"twin": "a"}, {"twin": "b", "measure": "x", "before": 0.0, "after": 1.0, "moved": True, "seconds": 3.0}]
    )
    assert "| a | - | - | - | no result | - |" in table and "| b | x | 0.000 | 1.000 | yes | 3 |" in table
