"""Every fault a few times: nothing hangs, nothing is lost or counted twice, and it is as before afterwards.

JAXRL_LLM_CHAOS=long tries them often, for half an hour; `python -m tests.chaos` does too, and prints the table of docs/measured/faults.md.
"""

import os
import re
from pathlib import Path

import pytest
from all_faults import FAULTS
from chaos_outages import torn
from chaos_samplers import no_wait_reads_the_calendar
from chaos_table import Trial

import jaxrl_llm

LONG = os.environ.get("JAXRL_LLM_CHAOS") == "long"
TIMES = {name: many if LONG else short for name, (_, short, many) in FAULTS.items()}


@pytest.mark.timeout(900 if LONG else 120)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", [name for name in FAULTS if TIMES[name]])
@pytest.mark.slow
def test_a_fault_is_survived(name: str, tmp_path: Path) -> None:
    row = FAULTS[name][0](Trial(folder=tmp_path, seed=sum(map(ord, name)), times=TIMES[name]))
    assert row.into == row.out, row.outcome
    assert row.tried >= TIMES[name] * (name != "reward process killed"), row.outcome


def test_no_wait_of_the_package_reads_the_calendar() -> None:
    """time.time jumps when a clock is set; what waits or measures reads time.monotonic or time.perf_counter."""
    assert not no_wait_reads_the_calendar(Path(jaxrl_llm.__file__).parent)


def test_a_wait_that_reads_the_calendar_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import time\nwhile time.time() - begin < 5:\n    pass\n")
    assert len(no_wait_reads_the_calendar(tmp_path)) >= 1


def test_the_page_of_faults_has_every_row_in_the_programs_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measured" / "faults.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["fault", *FAULTS]
    assert all(len(row) == 5 and int(row[1]) > 0 for row in rows[1:])
    assert not [row for row in rows if re.search("FAILED|NOT RUN", row[2])]


@pytest.mark.parametrize(
    ("name", "text", "is_torn"),
    (
        ("metrics.jsonl", '{"step": 1}\n{"step": 2}\n', False), ("metrics.jsonl", '{"step": 1}\n{"st', True),
        ("log.jsonl", '{"st{"step": 2}\n', True), ("health.json", '{"pid": ', True), ("health.json", '{"pid": 1}\n', False),
    ),
)  # fmt: skip
def test_torn_files_of_a_run_are_found(tmp_path: Path, name: str, text: str, is_torn: bool) -> None:
    (tmp_path / name).write_text(text)
    assert torn(tmp_path) == [name] * is_torn
