"""The history of a run is what its folder holds, also while another process writes there."""

import math
import re
from pathlib import Path

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.interface import page
from jaxrl_llm.interface.python_run import PythonRun


@pytest.mark.parametrize("torn", (b"", b'{"step": 2, "rew', b'{"step": 2, "gr\xc3'))
def test_a_row_that_is_being_written_is_no_part_of_the_history(tmp_path, torn):
    run, *_ = command_line.build(["gin/quickstart.gin"], [f"RUN_DIR = {str(tmp_path)!r}"])
    rows = b'{"step": 0}\n{"step": 1, "reward/mean": 0.5, "loss/total": "NaN"}\n'
    (tmp_path / "metrics.jsonl").write_bytes(rows + torn)
    (found,) = PythonRun(run, "").history
    assert math.isnan(found.pop("loss/total"))
    assert found == {"step": 1, "reward/mean": 0.5}


def test_a_notebook_draws_results_of_evaluations_and_no_lengths_or_counts():
    names = (
        "eval/held/greedy_length",
        "eval/held/greedy_truncated",
        "eval/held/greedy",
        "eval/held/at/4",
        "eval/held/prompts",
        "entropy/mean",
    )
    assert page.curves_of([dict.fromkeys(names, 1.0)]) == ["entropy/mean", "eval/held/greedy"]


def test_a_notebook_draws_metrics_that_are_explained():
    """The page of metrics is written by hand; its names are held to what runs write by a test of their own."""
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "metrics.md").read_text()
    assert set(page.CURVES) <= set(re.findall(r"`(\w+/\w+)`", text))
