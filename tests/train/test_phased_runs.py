"""Whole runs with a schedule: what each phase measures, and what a bad schedule says before anything runs."""

import json

import numpy as np
import pytest
import tiny_run

pytestmark = pytest.mark.slow

SHORT = {
    "STEPS": 2, "SAVE_EVERY": 9, "MINIBATCHES": 1, "BEST": "None", "train.Run.stages": "[@rl/train.Stage()]",
    "train.Stage.evaluations": "[]", "grpo.GRPO.entropy_coef": 0.0, "grpo.GRPO.kl_coef": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tests_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(tiny_run.ROOT / "tests"))


def rows_of(tmp_path, schedule, **more):
    """The steps of a run with a schedule."""
    file = tmp_path / "run.gin"
    file.write_text(f"include '{tiny_run.GIN_FILE}'\ninclude 'gin/schedules/{schedule}.gin'\n")
    done = tiny_run.launch(tmp_path / "run", str(file), **{**SHORT, **more})
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "stage" in row]


def test_bupo_measures_the_layer_and_the_whole_and_then_the_whole_alone(tmp_path):
    first, second = rows_of(tmp_path, "bupo", BUPO_LAYER=0, BUPO_STEPS=1, **{"train.BuPO.max_kl": 50.0})
    assert [row["phase"] for row in (first, second)] == [0, 1]
    assert abs(first["inside/logprob"] - first["logprob/mean"]) > 1e-3  # the layer's, and the model's own
    assert first["gap/max"] < 1e-4 and first["inside/entropy"] > 0 and first["entropy/mean"] > 0
    assert first["drift/kl"] == pytest.approx(0, abs=1e-6) and second["drift/kl"] > 0
    assert first["ratio/mean"] == pytest.approx(1, abs=1e-2)
    assert "inside/entropy" not in second and second["gap/max"] < 1e-4


def test_token_buncher_adds_noise_to_what_low_entropy_is_rewarded_for(tmp_path):
    (row,) = rows_of(tmp_path, "token_buncher", NOISER_WARMUP=0, STEPS=1, REWARD="@entropy.Entropy()")
    assert row["phase"] == 1
    assert row["reward/mean"] == pytest.approx(row["reward/entropy"], rel=1e-6)
    assert 0 < -row["reward/mean"] <= np.log(32) + 1e-6 and 0 < row["noiser/kept_fraction"] < 1
    total = 0.9 * row["noiser/nll"] + 0.1 * row["noiser/noise"]
    assert row["loss/total"] == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(("more", "words"), [
    ({"BUPO_LAYER": 1}, "train.BuPO.layer must be in 0..0"),
    ({"BUPO_LAYER": 0, "rl/train.Stage.old_logprobs": "'sampler'"}, "Stage.old_logprobs = 'learner'"),
])  # fmt: skip
def test_a_schedule_that_does_not_fit_is_refused_before_the_run(tmp_path, more, words):
    file = tmp_path / "run.gin"
    file.write_text(f"include '{tiny_run.GIN_FILE}'\ninclude 'gin/schedules/bupo.gin'\n")
    assert words in tiny_run.refused(tmp_path / "run", str(file), **{**SHORT, **more})
    assert not list((tmp_path).rglob("metrics.jsonl"))
