"""The runs of gin/real as jobs: what each starts from, waits for and reads; and the tables of those that have ended."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.eval.reports import real_systems
from jaxrl_llm.eval.reports.jobs import Job

MODEL, DATA, OUT = Path("/given/model"), Path("/given/data"), Path("/made")


def jobs(*systems: str, seeds: Sequence[int] = (0, 1)) -> dict[str, Job]:
    made = real_systems.jobs(real_systems.chosen(systems), seeds, MODEL, DATA, OUT, ["STEPS=7"])
    assert len({job.name for job in made}) == len(made)
    return {job.name: job for job in made}


EVERY = {name: job for name, job in jobs(*real_systems.ARMS).items() if "--gin_file=" in " ".join(job.commands[0])}


@pytest.mark.parametrize("name", EVERY)
def test_a_run_of_gin_real_takes_its_lines_and_its_model_and_waits_for_all_that_it_reads(name: str) -> None:
    command = EVERY[name].commands[0]
    file = next(x.removeprefix("--gin_file=") for x in command if x.startswith("--gin_file="))
    run, _ = command_line.build([file], [x.removeprefix("--gin=") for x in command if x.startswith("--gin=")])
    assert (run.run_dir, run.seed) == (str(OUT / name), int(name.rsplit("-", 1)[1]))
    started = [run.policy.pretrained, run.tokenizer.path]
    before = [other.removesuffix("-model") for other in EVERY[name].after if other.endswith("-model")]
    assert started == [str(OUT / before[0] / "model") if before else str(MODEL)] * 2
    (stage,) = run.stages
    read = {Path(source.path).name for source in (stage.data, *(e.data for e in stage.evaluations))}
    assert {f"data_{data_set}" for data_set in read} <= set(EVERY[name].after)


def test_what_others_start_from_comes_first_and_is_exported() -> None:
    made = jobs("classmate")
    assert [name for name in made if not name.startswith("data_")] == [
        "cs336_sft-0", "cs336_sft-0-model",
        "classmate_baseline-0", "classmate_baseline-1", "classmate_selfplay-0", "classmate_selfplay-1", "classmate_smollm2-0",
    ]  # fmt: skip
    for job in made.values():
        assert all(other in list(made)[: list(made).index(job.name)] for other in job.after)
    run, export = made["cs336_sft-0"], made["cs336_sft-0-model"]
    assert len(run.commands) == 1 and run.folder is None  # what has ended is not gone on with where its export fails
    assert export.after == ["cs336_sft-0"] and export.folder == OUT / "cs336_sft-0" / "model"
    assert export.commands[0][2:] == ["jaxrl_llm.tools.export", str(OUT / "cs336_sft-0"), "--out", str(export.folder)]


def test_single_arms_are_run_after_those_from_which_they_start() -> None:
    made = jobs("cs336_nobaseline", "darling", "darling_baseline", seeds=(1,))
    assert [name for name in made if not name.startswith("data_")] == [
        "cs336_sft-1", "cs336_sft-1-model", "darling_baseline-1", "darling-1", "cs336_nobaseline-1",
    ]  # fmt: skip


def test_data_are_prepared_once_from_the_given_folder() -> None:
    made = {name: job for name, job in jobs("darling", "bupo").items() if name.startswith("data_")}
    assert set(made) == {"data_hendrycks_math", "data_math500", "data_gsm8k", "data_svamp"}
    (command,) = made["data_math500"].commands
    assert made["data_math500"].folder == OUT / "data_sets" / "math500"
    said = "jaxrl_llm.data.prepare.math500 --source /given/data/math/math500.jsonl --out data_sets/math500"
    assert command[2:] == shlex.split(said)


def test_the_attacks_are_on_both_models_and_grpo_s_alone_on_every_seed() -> None:
    names = [name for name in jobs("tokenbuncher") if "_on_" in name]
    assert len(names) == 5 * 2 + 2 and "tokenbuncher_grpo_on_defended-1" in names


def ended(out: Path, *names: str) -> None:
    (out / "ended").mkdir(parents=True, exist_ok=True)
    for name in names:
        (out / "ended" / name).touch()


def test_a_table_is_of_the_seeds_of_which_both_arms_have_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[list[str]]] = []
    line = {"step": "last", "metric": "m", "a": 1.0, "b": 2.0, "difference": 1.0, "ci95": 0.5, "prompts": 3}

    def table(arms: Sequence[Sequence[Path]], steps: Sequence[str], ks: Sequence[int]) -> list[dict[str, object]]:
        asked.append([[folder.name for folder in arm] for arm in arms])
        return [line]

    monkeypatch.setattr(real_systems.real_runs, "table", table)
    ended(tmp_path, "darling-1", "darling_baseline-1", "darling_baseline-0", "darling_countdown-0", "data_math500")
    text = real_systems.tables(tmp_path)
    assert asked == [[["darling_baseline-1"], ["darling-1"]]]
    assert text.startswith("## darling_baseline (A), darling (B), seeds 1\n\n| step |") and "+1 +- 0.5" in text


def test_a_pair_that_cannot_be_read_leaves_the_others_their_tables(tmp_path: Path) -> None:
    ended(tmp_path, "darling-0", "darling_baseline-0")
    assert "holds no rollouts.jsonl" in real_systems.tables(tmp_path)


def test_each_slot_sees_one_of_the_gpus_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in real_systems.seen(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5e,7")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in real_systems.seen(2)] == ["4", "GPU-5e"]


def test_seeds_and_systems_that_are_said_twice_are_run_once_and_a_classmate_must_be_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Job] = []
    monkeypatch.setattr(real_systems.Runner, "run", lambda self, jobs, write: made.extend(jobs) or [])
    monkeypatch.chdir(tmp_path)
    ended(tmp_path / "out")
    given = ["--model", ".", "--data", ".", "--out", "out", "--gpus", "0", "--only", "classmate", "classmate"]
    assert real_systems.main([*given, "--seeds", "1", "1"]) == 0
    names = [job.name for job in made]
    assert len(names) == len(set(names)) and not any(name.startswith(real_systems.SMOLLM2) for name in names)
    made.clear()
    monkeypatch.chdir(tmp_path)
    assert real_systems.main([*given, "--classmate", "."]) == 0
    (smollm2,) = (job for job in made if job.name.startswith(real_systems.SMOLLM2))
    assert f"--gin=CLASSMATE={str(tmp_path)!r}" in smollm2.commands[0]


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--only", "cs337", "invalid choice: 'cs337' (choose from"),
        ("--gpus", "9", "must be 0 to"),
        ("--data", "/none", "is no folder"),
    ],
)
def test_a_wrong_flag_is_told_and_nothing_is_written(
    flag: str, value: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"--model": str(tmp_path), "--data": str(tmp_path), "--out": str(tmp_path / "out"), flag: value}
    with pytest.raises(SystemExit):
        real_systems.main([x for pair in flags.items() for x in pair])
    assert told in capsys.readouterr().err and not (tmp_path / "out").exists()
