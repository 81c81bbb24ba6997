"""A whole run of distillation from a teacher's whole distribution: planned, learned and resumed bit for bit."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("whole_run")]
FILE = """from __gin__ import dynamic_registration
from jaxrl_llm import train
include '{tiny}'
include 'gin/algorithms/gkd_jsd.gin'
TEACHER_PATH = '{teacher}'
train.Run.stages = [@rl/train.Stage()]
STEPS = 8
SAVE_EVERY = 4
EVALUATE_EVERY = 100
MINIBATCHES = 1
LEARNING_RATE = 3e-3
"""


def test_the_divergence_from_the_teacher_falls_and_a_resume_changes_nothing(tmp_path: Path) -> None:
    alone = {"train.Run.stages": "[@sft/train.Stage()]"}
    done = tiny_run.launch(tmp_path / "teacher", SFT_STEPS=12, SAVE_EVERY=100, EVALUATE_EVERY=100, **alone)
    assert done.returncode == 0, done.stderr
    file, run_dir = tmp_path / "run.gin", tmp_path / "run"
    file.write_text(FILE.format(tiny=tiny_run.GIN_FILE, teacher=tmp_path / "teacher"))
    done = tiny_run.launch(run_dir, str(file))
    assert done.returncode == 0, done.stderr
    rows = tiny_run.rows(run_dir)
    divergences = [row["distill/divergence"] for row in rows if "distill/divergence" in row]
    assert len(divergences) == 8 and np.mean(divergences[-2:]) < 0.7 * np.mean(divergences[:2])
    assert all(row["gap/mean"] < 1e-4 and 0 <= row["reward/mean"] <= 1 for row in rows if "distill/divergence" in row)
    shutil.rmtree(run_dir / "checkpoints" / "8")
    done = tiny_run.launch(run_dir, str(file))
    assert "resuming from step 4" in done.stdout and tiny_run.rows(run_dir) == rows, done.stderr
