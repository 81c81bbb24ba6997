"""Whole runs as a user starts them: killed and resumed bit for bit, repeated from their own configuration, exported, talked to."""

import io
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import forked
import pytest
import tiny_run

from jaxrl_llm.distributed.preemption import STOPPED
from jaxrl_llm.eval.reports import leaderboard

# One worker makes the undisturbed run and all tests that compare with it.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("whole_run")]


@pytest.fixture(scope="module", autouse=True)
def compiled_as_users_compile() -> Iterator[None]:
    """The programs of these runs have all optimisations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = tiny_run.launch(run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir


def saving(run_dir: Path, step: int) -> bool:
    """Whether a save of `step` has begun and is not whole yet."""
    return any(f"{step}." in p.name for p in (run_dir / "checkpoints").glob("*tmp*"))


# What a run has printed since it was started, or what lies in its folder.
MOMENTS: dict[str, Callable[[Path, str], bool]] = {
    "before the first save": lambda _, said: "step 1/8" in said,
    "during a save of the first stage": lambda run_dir, _: saving(run_dir, 2),
    "between the stages": lambda _, said: "step 3/8" in said,
    "in the second stage": lambda _, said: "step 6/8" in said,
}


def test_the_run_of_a_run_folder_goes_on_bit_for_bit_whenever_it_is_killed(whole: Path, tmp_path: Path) -> None:
    """The configuration that a run leaves behind repeats it, killed at each moment in turn."""
    run_dir = tmp_path / "run"
    for moment, come in MOMENTS.items():
        done = tiny_run.interrupted(run_dir, partial(come, run_dir), gin_file=str(whole))
        assert done.returncode == -signal.SIGKILL, f"the run ended before it was killed {moment}: {done.stderr}"
    done = tiny_run.launch(run_dir, gin_file=str(whole))
    assert done.returncode == 0 and "resuming from step" in done.stdout, done.stderr
    assert tiny_run.rows(run_dir) == tiny_run.rows(whole)


def test_a_finished_run_is_left_as_it_is(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    done = tiny_run.launch(whole)
    assert done.returncode == 0
    assert "finished" in done.stdout + done.stderr
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_time_limit_ends_a_run_after_a_step_with_everything_saved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = tiny_run.launch(run_dir, SFT_STEPS=1, **{"train.Run.stop_after_s": 0.0})
    assert done.returncode == 0, done.stderr
    assert "stopped after step 1 by train.Run.stop_after_s" in done.stdout
    assert [row["step"] for row in tiny_run.rows(run_dir)] == [0, 1]
    assert "eval/heldout/greedy" in tiny_run.rows(run_dir)[-1]
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["1"]
    health = json.loads((run_dir / "health.json").read_text())
    place = {"doing": "closing", "stage": "sft", "step": 1, "version": 1, "outcome": "ended"}
    assert {name: health[name] for name in place} == place
    log = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    assert (log[-1]["message"], log[-1]["step"], log[-1]["rank"]) == ("the run is over: ended", 1, 0)
    assert "INFO" not in done.stderr, "what is told at lower levels is for the log alone"


def test_the_run_folder_says_what_repeats_the_run(whole: Path) -> None:
    facts = json.loads((whole / "run.json").read_text())
    assert facts["seed"] == 0
    assert facts["version"] == "0.1.0"
    assert "STEPS = 5" in (whole / "config.gin").read_text()


def test_metrics_count_and_time_every_step(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines] == list(range(9))
    last = lines[-1]
    assert last["batch/sequences"] == 16
    assert last.get("count/finish/stop", 0) + last.get("count/finish/length", 0) == 16
    assert 0 <= last["gap/max"] < 1e-4
    assert last["reward/std"] > 0
    assert last["grad_norm/policy"] > 0
    assert last["loss/total"] == pytest.approx(last["loss/policy"] + last["loss/entropy"] + last["loss/kl"], abs=1e-7)
    assert {"time/collect_s", "time/score_s", "time/update_s", "speed/tokens_per_s", "eval/heldout/greedy"} <= set(last)


def test_a_whole_run_makes_a_row_of_the_leaderboard(whole: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "settings.json", "log.jsonl"):
        shutil.copy(whole / name, tmp_path)
    facts = json.loads((whole / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(facts | {"commit": "abc1234"}))  # a checkout under work has changes
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    row = leaderboard.row([tmp_path])
    assert (row["steps"], row["problems"], row["greedy"]) == ([8], 8, lines[8]["eval/heldout/greedy"])
    parts = ("publish", "collect", "score", "update")
    assert 60 * row["minutes"] >= sum(line[f"time/{part}_s"] for line in lines[5:] for part in parts)
    assert 60 * row["minutes"] < sum(line["time/step_s"] for line in lines[1:])
    assert 0 <= row["minutes_compiled"] < row["minutes"] and row["hardware"] == "1 x cpu"


def test_nothing_compiles_after_the_first_step_of_a_stage(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["compilations"] == lines[3]["compilations"]
    assert lines[4]["compilations"] == lines[8]["compilations"]


def test_sampled_rollouts_are_kept_for_reading(whole: Path) -> None:
    shown = [json.loads(line) for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    learned = [row for row in shown if "kind" not in row][-1]
    assert {"step", "question", "response", "reference", "reward", "finish"} <= set(learned)
    assert learned["question"].startswith("s:")
    streams = learned["streams"]
    assert set(streams) == {"token", "logprob", "entropy", "advantage", "sampler_logprob"}
    assert all(len(values) == learned["tokens"] for values in streams.values())
    assert streams["logprob"] == pytest.approx(streams["sampler_logprob"], abs=2e-3)  # four digits of the same policy's
    held_out = [row for row in shown if row.get("kind") == "eval/heldout"]
    asked = {step: [row["prompt"] for row in held_out if row["step"] == step] for step in (0, 8)}
    assert asked[0] == asked[8] and {row["role"] for row in held_out} == {"greedy", "sampled"}


def test_tensorboard_holds_scalars_rollouts_and_the_configuration(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(whole / "tensorboard"))
    found.Reload()
    steps = [e.step for e in found.Scalars("loss/total")]
    assert steps == list(range(1, 9))
    assert any("config" in tag for tag in found.Tags()["tensors"])


def test_an_exported_run_answers_in_transformers_as_it_does_here(whole: Path, tmp_path: Path) -> None:
    """The exported folder gives transformers the log-probs that the run's own policy has."""
    import jax
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from jaxrl_llm.tools import export
    from jaxrl_llm.train import load

    out = tmp_path / "model"
    assert export.main([str(whole), "--out", str(out)]) == 0
    assert export.main([str(whole), "--out", str(out)]) == 1  # it exists
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    tokens = np.asarray(tokenizer("s:gabhc=")["input_ids"], np.int32)[None]
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    found = load.saved(whole)
    policy, params = found.policy.plain, found.merged()
    places = np.arange(tokens.shape[1], dtype=np.int32)[None]
    hidden = jax.jit(policy.hidden)(
        params, jax.numpy.asarray(tokens), jax.numpy.asarray(places), jax.numpy.ones_like(tokens)
    )
    ours = np.asarray(hidden @ policy.head(params).T)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_chat_answers_each_line(
    whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxrl_llm.tools import chat

    asked, answer = [], chat.answer

    async def watched(sampler, tokens, settings, seed):  # type: ignore[no-untyped-def]
        asked.append(settings)
        return await answer(sampler, tokens, settings, seed)

    monkeypatch.setattr(chat, "answer", watched)
    monkeypatch.setattr("sys.stdin", io.StringIO("s:gabhc=\n\ns:bbbaa=\n"))
    assert chat.main([str(whole), "--max_tokens", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert [s.stop_token_ids for s in asked] == [(2,), (2,)]  # <eos> ends an answer
    assert chat.main([str(whole / "none")]) == 1


def test_a_run_goes_on_on_another_mesh(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight devices take up a checkpoint of one; the next losses agree to 1e-5."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # no program is shared with the other runs
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "8")
    done = tiny_run.launch(run_dir, devices=8, **{"train.MeshConfig.fsdp": 4, "train.MeshConfig.tensor": 2})
    assert done.returncode == 0 and "resuming from step 6" in done.stdout, done.stderr
    ours, theirs = tiny_run.rows(run_dir), tiny_run.rows(whole)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    assert ours[7]["loss/total"] == pytest.approx(theirs[7]["loss/total"], abs=1e-5)
    assert ours[7] != theirs[7]  # computed anew, on other devices


def test_a_checkpoint_of_another_model_is_refused(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    before = (run_dir / "metrics.jsonl").read_bytes()
    said = tiny_run.refused(run_dir, STEPS=9, **{"qwen3.Qwen3.width": 64})
    assert "policy.architecture.width was 32, is 64" in said and "RUN_DIR" in said
    given = [*tiny_run.arguments(run_dir, STEPS=9, **{"qwen3.Qwen3.width": 64}), "--resume_as_new"]
    done = forked.launch(given, tiny_run.environment(), timeout=500)
    assert done.returncode == 1
    assert "another model" in done.stderr and "RUN_DIR" in done.stderr
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_gradient_that_is_not_finite_stops_the_run_after_a_while(tmp_path: Path) -> None:
    done = tiny_run.launch(tmp_path / "run", SFT_STEPS=12, SFT_LEARNING_RATE=1e38)
    assert done.returncode == 1
    assert "not finite" in done.stderr and "learning_rate" in done.stderr


def test_a_full_disk_at_a_save_ends_with_what_to_do(tmp_path: Path) -> None:
    """The shell's limit on the size of files stands for the full disk; each matrix of the MLP alone is twice as large."""
    run_dir = tmp_path / "run"
    given = tiny_run.command(run_dir, **{"qwen3.Qwen3.mlp_width": 512})
    limited = ["bash", "-c", 'ulimit -f 60; exec "$@"', "limited", *given]
    done = subprocess.run(
        limited, cwd=tiny_run.ROOT, env=tiny_run.environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == STOPPED, "the same command goes on once there is space"
    assert "could not be written" in done.stdout and "RUN_DIR" in done.stdout
    assert not [p for p in (run_dir / "checkpoints").glob("*") if p.name.isdigit()]
