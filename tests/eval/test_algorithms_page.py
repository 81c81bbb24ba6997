"""The page of all algorithms is generated and current."""

import json
from pathlib import Path

import pytest

from jaxrl_llm.eval.reports import algorithms_page, learning_table
from jaxrl_llm.eval.reports.learning_runs import GIN

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "algorithms.md"


def test_the_page_is_current() -> None:
    found = json.loads(algorithms_page.MEASURED.read_text()) if algorithms_page.MEASURED.is_file() else []
    assert PAGE.read_text() == algorithms_page.page(found), (
        "python -m jaxrl_llm.eval.reports.algorithms_page > /tmp/page && cp /tmp/page docs/reference/algorithms.md"
    )


def test_every_algorithm_is_on_the_page_with_its_paper_and_its_file() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if ".gin` |" in line]
    files = sorted((GIN / "algorithms").glob("*.gin"))
    assert len(lines) == len(files)
    for line, file in zip(lines, files, strict=True):
        title, paper = learning_table.header(file)
        assert title in line and file.name in line and paper in line
        assert algorithms_page.component(file).is_file()


def test_the_equation_is_told_where_the_gin_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "x.gin"
    file.write_text(
        "# X, https://arxiv.org/abs/1, equation 4.7: it is\n# good.\nfrom __gin__ import dynamic_registration\n"
    )
    assert algorithms_page.equation(file) == ", equation 4.7"
    file.write_text("# X, https://arxiv.org/abs/1, equations 7 and 8.\n# More.\nfrom a import b\n")
    assert algorithms_page.equation(file) == ", equations 7 and 8"
    file.write_text("# X.\nfrom a import b\nX = 'equation 3'\n")
    assert algorithms_page.equation(file) == ""


def test_what_was_measured_is_told_in_the_algorithms_own_terms(tmp_path: Path) -> None:
    row = {"greedy_before": 0.4, "greedy_after": 0.75, "sampled_before": 0.2, "sampled_after": 0.5}
    told = lambda name, **more: algorithms_page.measured([{**row, "algorithm": name, **more}], {"sampled_after": 0.8})  # noqa: E731
    assert told("grpo") == "0.40 → 0.75"
    assert told("dpo", pairs_after=0.93) == "pairs 0.93"
    assert told("distill") == "closed 0.50 of the gap"
    assert algorithms_page.measured([], None) == "-"
    (tmp_path / "none.gin").write_text("# None.\n")
    with pytest.raises(ValueError, match="binds no component to ALGORITHM"):
        algorithms_page.component(tmp_path / "none.gin")
