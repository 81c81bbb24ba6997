"""Files of a run folder under a full disk and a kill: what is written is whole or not there, and what was there stays."""

import contextlib
import json
import logging
import resource
from collections.abc import Iterator

import pytest

from jaxrl_llm.metrics.run_folder import JsonLines, append_lines, replace_text
from jaxrl_llm.metrics.trackers import Kept
from jaxrl_llm.metrics.writers import Jsonl
from jaxrl_llm.train import settings


@contextlib.contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes, as on a disk that has so much left: the rest of a write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("beyond", (0, 1, 9))
def test_a_row_that_does_not_fit_on_the_disk_is_taken_back(tmp_path, beyond):
    writer, file = Jsonl().open(tmp_path, None), tmp_path / "metrics.jsonl"
    writer.write(1, {"x": 1.0})
    with full_at(len('{"step": 1, "x": 1.0}\n') + beyond), pytest.raises(OSError, match="writing metrics"):
        writer.write(2, {"x": 2.0})
    assert file.read_text() == '{"step": 1, "x": 1.0}\n'
    writer.write(2, {"x": 2.0})
    assert file.read_text() == '{"step": 1, "x": 1.0}\n{"step": 2, "x": 2.0}\n'


def test_all_rollouts_of_a_step_are_written_or_none(tmp_path):
    writer, row = Jsonl().open(tmp_path, None), '{"step": 1, "id": "a"}\n'
    with full_at(2 * len(row)), pytest.raises(OSError):
        writer.rollouts(1, [{"id": "a"}, {"id": "a"}, {"id": "a"}])
    assert (tmp_path / "rollouts.jsonl").read_text() == ""


def test_a_log_on_a_disk_that_was_full_meanwhile_has_whole_lines(tmp_path, capsys):
    file = tmp_path / "log.jsonl"
    log = JsonLines(file, 0, lambda: {"step": 4})
    say = lambda text: log.emit(logging.LogRecord("run", logging.INFO, "", 0, text, (), None))  # noqa: E731
    say("before")
    with full_at(file.stat().st_size + 20):
        say("lost")
    say("after")
    assert [json.loads(line)["message"] for line in file.read_text().splitlines()] == ["before", "after"]
    assert "OSError" in capsys.readouterr().err, "what is lost is said"


@pytest.mark.parametrize(("left", "kept"), (("a\nb", "a\n"), ("b", ""), ("a\n", "a\n"), ("", "")))
def test_a_torn_line_of_a_killed_process_never_gets_inside_a_file(tmp_path, left, kept):
    file = tmp_path / "lines"
    file.write_text(left)
    append_lines(file, "c\nd\n")
    assert file.read_text() == f"{kept}c\nd\n"


def test_a_text_that_does_not_fit_leaves_the_old_one(tmp_path):
    file = tmp_path / "config.gin"
    replace_text(file, "A = 1\n")
    with full_at(3), pytest.raises(OSError):
        replace_text(file, "A = 2\n")
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {"config.gin": "A = 1\n"}


class Run:
    """What `settings.note` asks of a run."""

    stages = ()


def test_settings_that_do_not_fit_leave_those_that_the_next_start_compares_with(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "settings_of", lambda run: {"seed": "3"})
    settings.note(tmp_path, Run(), [], None, 0)
    with full_at(4), pytest.raises(OSError):
        settings.note(tmp_path, Run(), [], None, 0)
    assert settings.read(tmp_path) == {"seed": "3"}


def test_changes_that_do_not_fit_are_noted_by_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "settings_of", lambda run: {"seed": "3"})
    file, found = tmp_path / settings.CHANGES, [settings.Change("watch.every_s", "1", "2")]
    settings.note(tmp_path, Run(), found, 5, 0)
    with full_at(file.stat().st_size + 30), pytest.raises(OSError):
        settings.note(tmp_path, Run(), found, 6, 0)
    settings.note(tmp_path, Run(), found, 7, 0)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [5, 7]


def test_a_trackers_run_is_known_again_after_a_full_disk(tmp_path):
    file = tmp_path / "tracked.json"
    kept = Kept(file, "mine", None)
    kept.id = "abc"
    kept.write(1)
    with full_at(5), pytest.raises(OSError):
        kept.write(2)
    again = Kept(file, "other", 1)
    assert (again.name, again.id, again.last) == ("mine", "abc", 1)
