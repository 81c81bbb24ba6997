"""A row of the leaderboard sums whole runs up, and is refused with the reason where one was not whole."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.eval.reports import leaderboard
from jaxrl_llm.tools import bench

SETTINGS = {
    "run_dir": "'a'", "seed": "0", "stop_after_s": "None", "stages[rl]": "Stage", "stages[rl].steps": "3",
    "stages[rl].evaluations[heldout].limit": "None", "stages[rl].evaluations[heldout].data.limit": "None",
    "stages[rl].optimizer.learning_rate": "1e-06",
}  # fmt: skip
FACTS = {"seed": 0, "commit": "abc1234def", "jax": "0.11.2", "devices": ["cuda:0"], "kind": "NVIDIA H200"}
BEGUN = ["stage rl goes on after step 0", "another line"]


def lines(greedy: float = 0.4) -> list[dict[str, Any]]:
    """A run of three steps: 60, 30 and 35 s, of which an evaluation takes 5, and compilation 40 and 2."""
    ends = {"eval/heldout/prompts": 1000.0}
    return [
        {"step": 0, "eval/heldout/greedy": 0.25, **ends},
        {"step": 1, "time/step_s": 60.0, "time/compile_s": 40.0, "memory/peak_gib": 50.0},
        {"step": 2, "time/step_s": 30.0, "time/compile_s": 2.0, "memory/peak_gib": 61.5},
        {"step": 3, "time/step_s": 35.0, "time/evaluate_s": 5.0, "time/compile_s": 0.0, "eval/heldout/greedy": greedy, **ends},
    ]  # fmt: skip


def run(folder: Path, **changes: Any) -> Path:
    """A run folder; `changes` replace what is written by file."""
    folder.mkdir(parents=True, exist_ok=True)
    told = changes.get("told", BEGUN)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in changes.get("lines", lines())))
    (folder / "settings.json").write_text(json.dumps(SETTINGS | changes.get("settings", {})))
    (folder / "run.json").write_text(json.dumps(FACTS | changes.get("facts", {})))
    (folder / "log.jsonl").write_text("".join(json.dumps({"message": x}) + "\n" for x in told))
    return folder


def test_a_row_is_made_of_the_steps_without_their_evaluations(tmp_path):
    one, two = (
        run(tmp_path / "0"),
        run(tmp_path / "1", lines=lines(0.44), facts={"seed": 1}, settings={"seed": "1", "run_dir": "'b'"}),
    )
    found = leaderboard.row([one, two])
    assert found["minutes"] == pytest.approx(2.0) and found["minutes_compiled"] == pytest.approx((120 - 42) / 60)
    assert (found["greedy_each"], found["seeds"], found["steps"], found["peak_gib"]) == (
        [0.4, 0.44],
        [0, 1],
        [3, 3],
        61.5,
    )
    assert found["interval"] == pytest.approx(0.0306, abs=1e-4), "1.96 sqrt(0.42 x 0.58 / 1000)"
    assert leaderboard.line({**found, "name": "ours"}) == (
        "| ours | 42.0 % (40.0, 44.0), from 25.0 | +- 3.1 | 2.00 | 1.30 | 3 | 61.5 | 1 x NVIDIA H200 | abc1234 |"
    )


def some(**changes: Any) -> list[dict[str, Any]]:
    """The lines with other ones by number; None leaves one out."""
    return [changes.get(f"line{i}", x) for i, x in enumerate(lines()) if changes.get(f"line{i}", x) is not None]


WITHOUT = {k: v for k, v in lines()[3].items() if k != "eval/heldout/greedy"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lines": some(line2=None)}, r"has not every step from 0 on once \(got \[0, 1, 3\]"),
        ({"lines": lines()[:1]}, "made no step"),
        ({"lines": [*lines()[:3], WITHOUT]}, "no eval/heldout/greedy after the last step"),
        ({"lines": some(line0={"step": 0})}, "no eval/heldout/greedy before the first step"),
        ({"told": [*BEGUN, "stage rl goes on after step 2"]}, r"was resumed \(stages went on after steps \[0, 2\]\)"),
        ({"settings": {"stages[rl].steps": "9"}}, r"ended after step 3 of 9 and 125 s \(.*None\): it was stopped"),
        ({"settings": {"stages[rl].steps": "9", "stop_after_s": "126"}}, "it was stopped"),
        ({"settings": {"stages[rl].evaluations[heldout].limit": "64"}}, "on a part of the problems .*EVALUATION_LIMIT"),
        ({"settings": {"stages[rl].evaluations[heldout].data.limit": "64"}}, "on a part of the problems"),
        ({"facts": {"commit": "abc1234+changes"}}, "of no commit"),
        ({"facts": {"commit": None}}, "of no commit"),
    ],
)
def test_a_run_that_was_not_whole_is_no_row(tmp_path, changes, why):
    with pytest.raises(leaderboard.Incomplete, match=why):
        leaderboard.row([run(tmp_path, **changes)])


def test_a_run_that_its_time_ended_evaluations_included_is_whole(tmp_path):
    whole = run(tmp_path, settings={"stages[rl].steps": "9", "stop_after_s": "124"})
    assert leaderboard.row([whole])["steps"] == [3]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"facts": {"seed": 1, "commit": "def"}}, "differ in their commit"),
        ({"facts": {"seed": 1, "kind": "NVIDIA H100"}}, "differ in their hardware"),
        (
            {"facts": {"seed": 1}, "settings": {"stages[rl].optimizer.learning_rate": "2e-06"}},
            "learning_rate: 1e-06, 2e-06",
        ),
        ({}, r"two runs have one seed \(got \[0, 0\]\)"),
    ],
)
def test_runs_of_one_row_differ_in_their_seeds_alone(tmp_path, changes, why):
    with pytest.raises(leaderboard.Incomplete, match=why):
        leaderboard.row([run(tmp_path / "0"), run(tmp_path / "1", **changes)])


def test_the_benchmark_prints_the_row_of_runs_that_are_there_and_makes_the_others(tmp_path, capsys, monkeypatch):
    made: list[list[str]] = []

    class Done:
        returncode = 0

    def launch(command: list[str]) -> Done:
        made.append(command)
        run(Path(command[-1].partition("=")[2].partition("=")[2].strip("'")), facts={"seed": 7}, settings={"seed": "7"})
        return Done()

    monkeypatch.setattr(leaderboard.subprocess, "run", launch)
    run(tmp_path / "runs" / "seed_0")
    flags = [
        "--work=speedrun",
        "--gin_file=x.gin",
        "--gin=STEPS=3",
        "--seeds=0,7",
        f"--runs={tmp_path / 'runs'}",
        "--name=ours",
    ]
    assert bench.main([*flags, f"--output={tmp_path / 'rows.jsonl'}"]) == 0
    (command,) = made
    assert command[1:] == [
        "-m", "jaxrl_llm.launch", "--gin_file=x.gin", "--gin=STEPS=3", "--gin=SEED=7", f"--gin=RUN_DIR='{tmp_path}/runs/seed_7'",
    ]  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == [0, 7] and found["name"] == "ours"
    assert found["command"] == "python -m jaxrl_llm.launch --gin_file=x.gin --gin=STEPS=3 --gin=SEED=N"
    assert leaderboard.main([str(tmp_path / "rows.jsonl")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert (
        len(table) == 3
        and len({len(re.findall(r"\|", x)) for x in table}) == 1
        and table[2].startswith("| ours | 40.0 %")
    )
    assert bench.main([*flags, "--gin=STEPS=4"]) != 0
    assert "holds runs of another command" in capsys.readouterr().err


def test_what_a_speedrun_lacks_is_said(capsys):
    for flags, said in (
        ([], "needs --gin_file and --runs"),
        (["--gin_file=x", "--runs=y", "--seeds=a"], "whole numbers"),
    ):
        with pytest.raises(SystemExit):
            bench.main(["--work=speedrun", *flags])
        assert said in capsys.readouterr().err
