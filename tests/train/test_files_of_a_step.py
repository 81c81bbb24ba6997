"""A step of GRPO enters few files: who reads it need not open more. The number may only fall."""

import subprocess
import sys

import pytest
import tiny_run

pytestmark = pytest.mark.slow

MOST = 67  # files of the package that one step enters, its programs' tracing, its evaluation and its save included

PROGRAM = """
import os, sys, threading
from jaxrl_llm import command_line
from jaxrl_llm.train import trainer

root, entered = os.path.realpath(sys.argv[1]), set()

def seen(frame, event, argument):
    if event == "call":
        entered.add(frame.f_code.co_filename)

step = trainer.Trainer.step

async def watched(*arguments):
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        return await step(*arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

trainer.Trainer.step = watched
run, config = command_line.build(["tests/tiny.gin"], sys.argv[2:])
run.run(config)
entered, tests = set(map(os.path.realpath, entered)), os.path.join(root, "tests")
print(*sorted(f[len(root) + 1 :] for f in entered if f.startswith(root) and not f.startswith(tests)), sep="\\n", file=sys.stderr)
"""


def test_a_step_of_grpo_enters_few_files(tmp_path):
    bindings = tiny_run.bindings(tmp_path / "run", **tiny_run.RL_ALONE, STEPS=1, SAVE_EVERY=1, EVALUATE_EVERY=1)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_run.ROOT), *bindings], cwd=tiny_run.ROOT, env=tiny_run.environment(),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    entered = [line for line in done.stderr.splitlines() if line.endswith(".py")]
    for file in (
        "train/trainer",
        "train/step",
        "rollouts/collect",
        "learner/batch",
        "learner/learner",
        "models/policy",
    ):
        assert f"jaxrl_llm/{file}.py" in entered
    assert len(entered) <= MOST, f"{len(entered)} files: {entered}"
