"""Preference losses that learn from the policy's own samples: whole runs that learn, and of each kind of state one that is resumed bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("whole_run")]
FILE = """from __gin__ import dynamic_registration
from jaxrl_llm import train
include '{tiny}'
include 'gin/algorithms/{algorithm}.gin'
train.Run.stages = [@rl/train.Stage()]
rl/train.Stage.evaluations = ()
STEPS = 16
SAVE_EVERY = 12
PROMPTS_PER_STEP = 16
MINIBATCHES = 1
ROWS = 32  # one micro-batch, so that gradient and update are one program
LEARNING_RATE = 3e-3
{more}
"""
# gin lines beyond those of the algorithm: the reference is renewed between the checkpoint and the end of the run.
RUNS = {
    "online_dpo": "",
    "online_ipo": "",
    "online_simpo": "",
    "online_kto": "ROWS = 64",
    "sppo": "REFERENCE_EVERY = 5\nROWS = 64",
    "spin": "REFERENCE_EVERY = 5\nGROUP_SIZE = 1",
}

RESUMED = ("online_dpo", "sppo", "spin")  # the others keep no more than the first of these


def start(folder: Path, name: str) -> Any:
    file = folder / "run.gin"
    file.write_text(FILE.format(tiny=tiny_run.GIN_FILE, algorithm=name, more=RUNS[name]))
    return tiny_run.launch(folder / "run", str(file))


@pytest.mark.parametrize("name", RUNS)
def test_it_learns_from_its_own_samples_and_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    done = start(tmp_path, name)
    assert done.returncode == 0, done.stderr
    rows = tiny_run.rows(tmp_path / "run")
    learned = [row for row in rows if "loss/policy" in row]
    assert len(learned) == 16 and all(row["gap/mean"] < 1e-4 for row in learned)
    if name == "spin":
        margins = [row["pairs/margin"] for row in learned]
        assert max(margins[1:5]) > 0.05  # of the first iteration, which begins at 0
        assert abs(margins[0]) < 1e-4 and abs(margins[5]) < 1e-4 and abs(margins[10]) < 1e-4  # a new reference
        rejected = [row["pairs/chosen_logprob"] - row["pairs/rejected_logprob"] for row in learned]
        assert np.mean(rejected[-4:]) > np.mean(rejected[:4])
    else:
        rewards = [row["reward/mean"] for row in learned]
        assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05
    if name in ("sppo", "spin"):
        assert not (tmp_path / "run" / "reference").exists()  # checkpoints hold it
    if name in RESUMED:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "16")
        done = start(tmp_path, name)
        assert "resuming from step 12" in done.stdout and tiny_run.rows(tmp_path / "run") == rows, done.stderr
