"""Commands explain themselves as they are written, and say in one line what the user can put right."""

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.data.prepare import gsm8k, preparation
from jaxrl_llm.metrics import profiling


def test_help_keeps_the_lines_of_its_description():
    assert "\n    python -m x\n" in command_line.parser("x", "What it does:\n\n    python -m x\n\nEnds.").format_help()


def test_an_error_that_the_user_can_put_right_is_one_line(tmp_path, capsys, monkeypatch):
    assert profiling.main([str(tmp_path)]) == 1
    monkeypatch.setattr("sys.argv", ["gsm8k", "--out", str(tmp_path / "out"), "--source", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        preparation.command(gsm8k.PREPARATION)
    first, second = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and first.startswith("error: no trace") and second.startswith("error: no data at")


def test_other_errors_keep_their_stack():
    with pytest.raises(KeyError):
        command_line.ended(lambda: {}["missing"])


def test_the_packages_files_are_found_from_any_folder_without_a_word_of_where_they_are_not(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text("include 'gin/quickstart.gin'\nSTEPS = 3\n")
    run, _ = command_line.build(["mine.gin"])
    assert run.stages[-1].steps == 3 and not caplog.records
