"""One process writes a run folder; a lock outlives nobody."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm.metrics import run_lock
from jaxrl_llm.metrics.run_lock import locked

HOLDS = "import sys, time; from pathlib import Path; from jaxrl_llm.metrics.run_lock import locked\nwith locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"


def holding(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path):
    process = holding(tmp_path)
    try:
        told = rf"process {process.pid} on {socket.gethostname()}, which began at 20.*set RUN_DIR to another folder"
        with pytest.raises(ValueError, match=told), locked(tmp_path):
            raise AssertionError("both write")
    finally:
        process.kill()
        process.wait()


def test_a_killed_owner_leaves_no_lock_and_is_named(tmp_path, caplog):
    process = holding(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with locked(tmp_path):
        assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "owner.json").exists()
    assert [f"took over {tmp_path} from process {process.pid}" in r.getMessage() for r in caplog.records] == [True]


def elsewhere(folder: Path, age_s: float) -> Path:
    """The mark of an owner on another host, which beat `age_s` seconds ago."""
    owner = folder / "owner.json"
    owner.write_text(json.dumps({"host": "other", "boot": "b", "pid": 7, "began": "1", "since": "2026-01-01"}))
    os.utime(owner, (time.time() - age_s,) * 2)
    return owner


@pytest.mark.parametrize(("beats", "age_s"), [(True, 0.0), (False, 0.0), (False, 3600.0)])
def test_an_owner_on_a_host_whose_locks_are_not_seen_is_known_by_its_heartbeat(tmp_path, monkeypatch, beats, age_s):
    monkeypatch.setattr(run_lock, "SILENT_S", 0.3)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.1)
    owner = elsewhere(tmp_path, age_s)
    if beats:
        later = time.time() + 100
        monkeypatch.setattr(run_lock.time, "sleep", lambda s: os.utime(owner, (later, later)))
        with pytest.raises(ValueError, match="process 7 on other"), locked(tmp_path):
            raise AssertionError("both write")
    else:
        with locked(tmp_path):
            assert json.loads(owner.read_text())["host"] == socket.gethostname()


def test_a_file_system_without_locks_is_kept_by_the_mark_of_a_living_process(tmp_path, monkeypatch, caplog):
    def missing(*_):
        raise OSError(run_lock.errno.ENOLCK, "no locks available")

    process = holding(tmp_path)
    try:
        monkeypatch.setattr(run_lock.fcntl, "flock", missing)
        with pytest.raises(ValueError, match=f"process {process.pid} "), locked(tmp_path):
            raise AssertionError("both write")
    finally:
        process.kill()
        process.wait()
    with locked(tmp_path):
        pass
    assert "has no file locks" in caplog.text


def test_a_process_that_has_a_dead_owners_number_is_another(tmp_path):
    known = {"host": socket.gethostname(), "boot": run_lock._boot(), "pid": os.getppid(), "began": "1", "since": "x"}
    (tmp_path / "owner.json").write_text(json.dumps(known))
    with locked(tmp_path):
        pass
