"""Jobs: what waits for what, what is not run again, what a failure and a stop leave."""

import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

from jaxrl_llm.eval.reports import jobs, proofs
from jaxrl_llm.eval.reports.jobs import Cores, Job, Runner


def job(name: str, script: str, after: tuple[str, ...] = (), folder: Path | None = None) -> Job:
    return Job(name=name, commands=[[sys.executable, "-S", "-c", script]], after=after, folder=folder)


def runner(tmp_path: Path, **fields: object) -> Runner:
    return Runner(logs=tmp_path / "logs", marks=tmp_path / "ended", **fields)  # type: ignore[arg-type]


def test_a_failure_leaves_the_others_running_and_what_ended_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrote = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    made = [
        job("good", wrote),
        job("bad", "import sys; print('it broke'); sys.exit(3)"),
        job("behind", wrote, after=("bad",)),
        job("later", wrote, after=("good",)),
    ]
    ended: list[str] = []
    assert runner(tmp_path).run(made, ended.append) == ["bad", "behind"]
    assert sorted(ended) == ["good", "later"] and (tmp_path / "count").read_text() == "xx"
    said = capsys.readouterr().out
    assert "bad: failed: it broke (all of it in" in said and "behind: waits" in said
    assert (tmp_path / "logs" / "bad.txt").read_text() == "it broke\n"
    again: list[str] = []
    assert runner(tmp_path).run(made[:1], again.append) == [] and again == ["good"]
    assert (tmp_path / "count").read_text() == "xx"


def test_results_that_cannot_be_read_stop_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ended(name: str) -> None:
        if name == "odd":
            raise KeyError("reward/mean")

    assert runner(tmp_path).run([job("odd", "pass"), job("behind", "pass", after=("odd",))], ended) == ["odd"]
    assert "KeyError: 'reward/mean'" in capsys.readouterr().err


def test_a_job_without_its_folder_is_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    made = [job("export", f"import os; os.mkdir({str(folder)!r})", folder=folder)]
    assert runner(tmp_path).run(made, lambda _: None) == []
    folder.rmdir()
    assert runner(tmp_path).run(made, lambda _: None) == [] and folder.is_dir()


def test_at_the_deadline_what_runs_is_stopped_and_nothing_is_begun(tmp_path: Path) -> None:
    begin = time.monotonic()
    made = [job("long", "import time; time.sleep(60)"), job("next", "pass", after=("long",)), job("other", "pass")]
    assert runner(tmp_path, deadline=begin + 0.3).run(made, lambda _: None) == ["long", "next", "other"]
    assert time.monotonic() - begin < 20 and not list((tmp_path / "ended").iterdir())


def test_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names of their own"):
        runner(tmp_path).run([job("a", "pass"), job("a", "pass")], lambda _: None)


def test_the_commands_of_a_slot_have_its_variables(tmp_path: Path) -> None:
    made = [job(name, "import os; print('sees', os.environ['SEEN'])") for name in "ab"]
    cores = Cores(2, 1, [{"SEEN": "left"}, {"SEEN": "right"}])
    assert runner(tmp_path, cores=cores).run(made, lambda _: None) == []
    said = [file.read_text().strip() for file in (tmp_path / "logs").iterdir()]
    assert set(said) <= {"sees left", "sees right"} and len(said) == 2


def test_the_most_urgent_job_gets_the_next_free_cores() -> None:
    cores, order, threads = Cores(1, 1), [], []

    def take(urgency: int) -> None:
        with cores.slot(urgency):
            order.append(urgency)

    with cores.slot(1):
        for number, urgency in enumerate((1, 3, 2)):
            threads.append(threading.Thread(target=take, args=(urgency,)))
            threads[-1].start()
            while len(cores._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [3, 2, 1]


def test_a_job_is_as_urgent_as_its_chain_is_long() -> None:
    made = [
        job("a", ""),
        job("b", "", after=("a",)),
        job("c", "", after=("b",)),
        job("d", "", after=("a",)),
        job("e", ""),
    ]
    assert jobs.chains(made) == {"a": 3, "b": 3, "c": 3, "d": 2, "e": 1}


def test_cores_of_jobs_are_disjoint_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert sorted(core for number in range(8) for core in jobs.core_set(number, 2)) == list(range(16))
    assert jobs.core_set(8, 2) == [0, 1]


def test_the_archive_holds_results_and_what_a_restart_reads(tmp_path: Path) -> None:
    there = ("out/a/x.json", "out/a/results.tgz", "runs/p/ended/r", "runs/p/times.json")
    folders = ("runs/p/r/metrics.jsonl", "runs/p/r/checkpoints/1/state", "runs/p/stopped/metrics.jsonl")
    for name in (*there, *folders):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    file = jobs.archive(tmp_path / "out", tmp_path / "runs")
    with tarfile.open(file) as tar:
        held = {member.name for member in tar.getmembers() if member.isfile()}
    assert held == {"results/a/x.json", "runs/p/r/metrics.jsonl", "runs/p/ended/r", "runs/p/times.json"}


def test_all_parts_share_the_cores_and_a_failed_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, tuple[list[str], Cores]] = {}

    def part(name: str, code: int | None) -> object:
        def main(argv: list[str], cores: Cores) -> int:
            seen[name] = argv, cores
            if code is None:
                raise KeyError("no such row")
            return code

        return main

    monkeypatch.setattr(proofs, "PARTS", {"one": part("one", 0), "two": part("two", 1), "three": part("three", None)})
    folders = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    (tmp_path / "out").mkdir()
    (tmp_path / "runs").mkdir()
    assert proofs.main([*folders, "--only", "three,one,two", "--minutes", "9", "--gin", "STEPS=2"]) == 1
    assert seen["one"][1] is seen["two"][1]
    assert seen["two"][0] == [
        f"--out={tmp_path}/out/two",
        f"--runs={tmp_path}/runs/two",
        "--minutes=9.0",
        "--gin=STEPS=2",
    ]
    assert "not all of three, two" in capsys.readouterr().out
