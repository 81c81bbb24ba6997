"""The learning proof: a run of every algorithm from one checkpoint, and the table of what the runs measured."""

import json
from pathlib import Path
from typing import Any

import gin
import pytest

from jaxrl_llm.command_line import build
from jaxrl_llm.eval.reports import learning_runs, learning_table
from jaxrl_llm.train.stage import Stage

NAMES = learning_runs.names()
# What sorting strings does not have: a second sampler and a marked chain of thought, or texts that mean the same.
OTHER_TASKS = {"grpo_w_classmate", "pair_classifier"}


def test_every_algorithm_has_a_run_and_is_named_once() -> None:
    there = {p.stem for p in (learning_runs.GIN / "algorithms").glob("*.gin")}
    assert there - set(NAMES) <= OTHER_TASKS and len(NAMES) == len(set(NAMES)) >= 37
    assert set(NAMES[-4:]) == {
        n for n in there if n == "distill" or n.startswith("gkd")
    }  # their teacher is trained meanwhile


@pytest.mark.parametrize("name", NAMES)
def test_a_run_starts_at_the_common_checkpoint_with_its_algorithm(name: str) -> None:
    run, _ = build([f"{learning_runs.GIN}/learning/{name}.gin"], ["START = 'there'", "SEED = 2", "TRAIN_ROWS = 64"])
    (stage,) = run.stages
    assert run.policy.pretrained == "there" and run.policy.architecture is None and run.seed == 2
    assert isinstance(stage, Stage)
    gin.clear_config(clear_constants=True)
    gin.parse_config_files_and_bindings([f"{learning_runs.GIN}/algorithms/{name}.gin"], ["RESPONSE_LIMIT = 12"])
    named = gin.get_configurable("ALGORITHM/gin.macro")()
    assert type(stage.algorithm).__name__ == type(named).__name__
    if stage.samples:
        updates = 1 if name in ("remax", "online_kto") else 4  # whose comments say why
        assert (stage.steps, stage.prompts_per_step, stage.group_size, stage.minibatches) == (80, 64, 8, updates)
    assert (stage.held_out is not None) == (stage.algorithm.learns_from == "pairs")


def test_held_out_strings_are_the_same_for_every_seed_and_never_trained_on() -> None:
    held_out = []
    for seed in (0, 1):
        files, bindings = (
            [f"{learning_runs.GIN}/learning/kto.gin"],
            ["START = 'there'", f"SEED = {seed}", "TRAIN_ROWS = 2000"],
        )
        (stage,) = build(files, bindings)[0].stages
        seen = {row.text for row in stage.data.rows()}
        for unseen in (stage.held_out, stage.evaluations[0].data):
            held_out.append([row.text for row in unseen.rows()])
            assert seen.isdisjoint(held_out[-1])
    assert held_out[0] == held_out[1] == held_out[2] == held_out[3] and len(held_out[0]) == 512


def test_the_header_of_a_gin_file_names_algorithm_and_paper(tmp_path: Path) -> None:
    file = tmp_path / "x.gin"
    file.write_text("# X, https://arxiv.org/abs/1: it is\n# good.\nfrom __gin__ import dynamic_registration\n")
    assert learning_table.header(file) == ("X", "https://arxiv.org/abs/1")
    file.write_text("# X: it is good.\nA = 1\n")
    assert learning_table.header(file) == ("X", "")
    file.write_text("A = 1\n")
    with pytest.raises(ValueError, match="does not open with a comment"):
        learning_table.header(file)
    assert all(all(learning_table.header(learning_runs.algorithm_file(n))) for n in NAMES if n != "sft")


def run_folder(folder: Path, greedy: list[float], pairs: list[float] | None = None) -> Path:
    """A run folder with these evaluations, a step of 2 s between them."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step, value in enumerate(greedy):
        row = {"step": step, "time/step_s": 2.0, "eval/heldout/greedy": value, "eval/heldout/sampled": value / 2}
        row |= {"eval/heldout/greedy_distinct": 9.0, "eval/heldout/sampled_distinct": 8.0}
        rows.append(row | ({"eval/pairs/accuracy": pairs[step]} if pairs else {}))
    rows.insert(1, {"step": 1, "time/step_s": 3.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"commit": "c0", "jax": "0.10.2", "devices": ["cpu"]}))
    return folder


def result_of(out: Path, name: str, seed: int, *values: Any) -> dict[str, Any]:
    folder = run_folder(out / "runs" / f"{name}-{seed}", *values)
    found = learning_table.result(folder, name, seed, learning_runs.algorithm_file(name))
    (out / f"{name}-{seed}.json").write_text(json.dumps(found))
    return found


def test_a_result_is_what_the_run_measured_first_and_last(tmp_path: Path) -> None:
    found = result_of(tmp_path, "dpo", 1, [0.2, 0.3, 0.6], [0.0, 0.5, 0.95])
    assert (found["greedy_before"], found["greedy_after"], found["sampled_after"]) == (0.2, 0.6, 0.3)
    assert (found["pairs_before"], found["pairs_after"], found["greedy_distinct_after"]) == (0.0, 0.95, 9.0)
    assert found["curve"] == [[0, 0.2, 0.1, 0.0], [1, 0.3, 0.15, 0.5], [2, 0.6, 0.3, 0.95]]
    assert (
        found["seconds"] == 9.0
        and (found["commit"], found["jax"]) == ("c0", "0.10.2")
        and found["paper"].endswith("2305.18290")
    )


def test_the_table_says_what_the_worst_seed_reaches(tmp_path: Path) -> None:
    result_of(tmp_path, "grpo", 0, [0.4, 0.7])
    result_of(tmp_path, "grpo", 1, [0.4, 0.55])
    result_of(tmp_path, "opo", 0, [0.4, 0.55])
    result_of(tmp_path, "dpo", 0, [0.4, 0.4], [0.0, 0.93])
    result_of(tmp_path, "teacher", 0, [0.0, 0.8])
    result_of(tmp_path, "distill", 0, [0.4, 0.64])  # sampled: 0.20 to 0.32, of a teacher's 0.40
    learning_table.write(tmp_path)
    lines = (tmp_path / "learning.md").read_text().splitlines()
    ends = {line.split("|")[1].strip(): line.rpartition("| ")[2] for line in lines if line.startswith("| ")} or {}
    told = {name: next(line for line in lines if line.startswith(f"| {name}")) for name in ends}
    assert "no: gain, greedy 0.15 at least (wanted 0.2)" in told["GRPO"] and "0.70 0.55" in told["GRPO"]
    assert "yes: gain, greedy 0.15 at least (wanted 0.1)" in told["OPO"]
    assert "yes: held-out pairs told apart 0.93 at least" in told["DPO"]
    assert "yes: share of the gap to the teacher closed (sampled) 0.60" in told["On-policy distillation by reverse KL"]
    assert lines[-1] == "The teacher of distillation: 0.80 greedy, 0.40 sampled."
    assert len(json.loads((tmp_path / "learning.json").read_text())) == 6


def test_every_run_stands_after_what_it_begins_from() -> None:
    made = {job.name: job for job in learning_runs.jobs(["grpo", "distill"], [0, 1], Path("/runs"), ["STEPS=2"])}
    assert list(made) == ["start-0", "teacher-0", "grpo-0", "grpo-1", "distill-0", "distill-1"]
    assert made["start-0"].folder == Path("/runs/start-0/model") and len(made["start-0"].commands) == 2
    assert list(made["grpo-1"].after) == ["start-0"] and list(made["distill-0"].after) == ["start-0", "teacher-0"]
    (command,) = made["distill-1"].commands
    assert {"--gin=START='/runs/start-0/model'", "--gin=TEACHER_PATH='/runs/teacher-0'"} <= set(command)
    assert {"--gin=SEED=1", "--gin=RUN_DIR='/runs/distill-1'", "--gin=STEPS=2"} <= set(command)
    assert not any("TEACHER_PATH" in flag for flag in made["grpo-0"].commands[0])
