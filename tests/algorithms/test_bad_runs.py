"""A run that cannot give what its algorithm needs is refused when it is built, with the binding to change."""

from pathlib import Path

import pytest

from jaxrl_llm.command_line import build

CASES = {
    "no critic": ("ppo", ["CRITIC = None"], r"Stage.critic of stage 'rl' is not set: .*set CRITIC = "),
    "no teacher": ("distill", ["TEACHER = None"], r"Stage.teacher of stage 'rl' is not set: .*set TEACHER_PATH"),
    "a teacher without a name": ("distill", [], r"set MODEL_PATH, or TEACHER_PATH"),
    "no reward model": ("reward_model", ["REWARD_MODEL = None"], r"Stage.reward_model .* is not set: .*set REWARD_MODEL = "),
    "a group of one": ("grpo", ["GROUP_SIZE = 1"], r"GRPO needs group_size >= 2 \(got 1\): set GROUP_SIZE"),
    "a group of one to leave out": ("rloo", ["GROUP_SIZE = 1"], r"RLOO needs group_size >= 2 \(got 1\): set GROUP_SIZE"),
    "no best of one": ("grpo_passk", ["GROUP_SIZE = 1"], r"group_size >= 2 \(got 1\): set GROUP_SIZE"),
    "a selection by a ratio of 1": (
        "grpo",
        ["train.Stage.old_logprobs = 'sampler'", "grpo.GRPO.rejections = (@correction.Rejection(),)"],
        r"set Stage.old_logprobs = 'learner'",
    ),
    "bounds in the wrong order": ("grpo", ["correction.Correction.ratio_min = 3.0"], r"correction.Correction.ratio_min must be in \[0, 2.0\) \(got 3.0\)"),
    "no reward": ("grpo", ["REWARD = None"], r"GRPO learns from samples and stage 'rl' has no reward: set Stage.reward"),
    "a KL to move without a KL": ("grpo", ["grpo.GRPO.kl_controller = @divergence.AdaptiveKL()"], r"grpo.GRPO.kl_coef must be > 0"),
    "adapters of rank 0": ("sft", ["sources.PolicySource.lora = @lora.LoRA()", "lora.LoRA.rank = 0"], r"lora.LoRA.rank must be >= 1"),
    "adapters of nothing": (
        "sft",
        ["sources.PolicySource.lora = @lora.LoRA()", "lora.LoRA.targets = ('c_attn',)"],
        r"lora.LoRA.targets must name linear maps of a layer",
    ),
    "silent sequences that an entropy bonus reaches": (
        "grpo",
        ["rl/train.Stage.skip_silent = True", "grpo.GRPO.entropy_coef = 0.01"],
        r"skip_silent of stage 'rl' is for policy gradients .*got GRPO.*entropy_coef",
    ),
    "silent sequences that a critic learns from": ("ppo", ["rl/train.Stage.skip_silent = True"], r"skip_silent .*got PPO"),
    "measured pairs where samples are learned from": ("grpo", ["HELD_OUT = @sorting.Sorting()"], r"set HELD_OUT = None"),
}  # fmt: skip
IMPORTS = """from __gin__ import dynamic_registration
from jaxrl_llm import train
from jaxrl_llm.algorithms import correction
from jaxrl_llm.algorithms import divergence
from jaxrl_llm.algorithms import grpo
from jaxrl_llm.algorithms import sft
from jaxrl_llm.data import sorting
from jaxrl_llm.models import lora
from jaxrl_llm.models import sources
divergence.AdaptiveKL.target = 0.1
divergence.AdaptiveKL.horizon = 10
grpo.GRPO.correction = @correction.Correction()
"""


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str, tmp_path: Path) -> None:
    algorithm, bindings, message = CASES[case]
    file = tmp_path / "run.gin"
    lines = ["include 'gin/quickstart.gin'", f"include 'gin/algorithms/{algorithm}.gin'", *bindings]
    file.write_text(IMPORTS + "\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        build([str(file)], ["TRAIN_ROWS = 8"])
