"""The numbers of every full-size recipe, as a run resolves them, against tables copied by hand from what the authors published.

Where a recipe differs from its original on purpose, its header says so, and NOTED names the words.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.train.settings import settings_of

GIN = Path(__file__).parents[2] / "gin"
Numbers = Mapping[str, Any]

STAGE = "prompts_per_step", "group_size", "max_prompt_tokens", "settings.max_tokens", "minibatches", "steps"
# PyTorch's and verl's AdamW, with a constant rate and gradients clipped to 1.
ADAMW: Numbers = {
    "optimizer.b1": 0.9, "optimizer.b2": 0.999, "optimizer.epsilon": 1e-8, "optimizer.weight_decay": 0.01,
    "optimizer.max_grad_norm": 1.0, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0,
}  # fmt: skip
# verl's clipped surrogate, without weights for the sampler's mismatch, and samples of the policy itself.
CLIPPED: Numbers = {
    "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2, "algorithm.correction": None, "algorithm.rejections": (),
    "algorithm.entropy_coef": 0.0, "settings.temperature": 1.0, "settings.top_p": 1.0, "settings.top_k": 0, "epochs": 1,
}  # fmt: skip
NO_KL: Numbers = {"algorithm.kl_coef": 0.0}
KL_IN_REWARD: Numbers = {"algorithm.kl_coef": 0.001, "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"}
EVALUATION = "evaluations[heldout]"


def sizes(*values: int) -> Numbers:
    """Prompts of a step, responses to each, most tokens of both, updates of a step, steps."""
    return dict(zip(STAGE, values, strict=True))


def verl(rate: float, dual: float, aggregation: str) -> Numbers:
    return {
        **ADAMW,
        **CLIPPED,
        "optimizer.learning_rate": rate,
        "algorithm.clip_dual": dual,
        "algorithm.aggregation": aggregation,
    }


# -- TokenBuncher: configs/*.sh of Georgefwt/Token-Buncher ---------------------------------------------------------------
BUNCHER: Numbers = {**verl(1e-6, 3.0, "token-mean"), "save": 50}
TOKENBUNCHER: Mapping[str, Numbers] = {
    "tokenbuncher_defence": {
        **BUNCHER, **KL_IN_REWARD, **sizes(32, 4, 320, 1024, 4, 200), "algorithm": "GRPO", "algorithm.std": True,
        "schedule.warmup_steps": 25, "schedule.period": 2, "schedule.noiser.epsilon": 0.1, "schedule.noiser.weights": "paper",
    },
    "tokenbuncher_attack_grpo": {
        **BUNCHER, **NO_KL, **sizes(32, 4, 320, 960, 4, 100), "algorithm": "GRPO", "algorithm.std": True, "reward.maximum": None,
    },
    "tokenbuncher_attack_adaptive": {
        **BUNCHER, **NO_KL, **sizes(32, 4, 320, 960, 4, 100), "algorithm": "GRPO", "reward.parts[entropy].maximum": 3.0,
        "reward.parts[entropy].coefficient": 1.0,
    },
    "tokenbuncher_attack_ppo": {
        **BUNCHER, **KL_IN_REWARD, **sizes(32, 1, 320, 960, 16, 100), "algorithm": "PPO", "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
        "algorithm.value_clip": 0.5, "critic_optimizer.learning_rate": 1e-5, "critic_optimizer.b2": 0.999,
        "critic_optimizer.weight_decay": 0.01, "critic_optimizer.max_grad_norm": 1.0, "critic_warmup_steps": 0,
    },
    "tokenbuncher_attack_reinforce_plus_plus": {
        **BUNCHER, **KL_IN_REWARD, **sizes(32, 1, 320, 960, 4, 100), "algorithm": "ReinforcePlusPlus", "algorithm.gamma": 1.0,
        "algorithm.baseline": False,
    },
    "tokenbuncher_attack_rloo": {**BUNCHER, **NO_KL, **sizes(32, 4, 320, 960, 1, 100), "algorithm": "RLOO"},
    "tokenbuncher_attack_obj2": {
        **BUNCHER, **NO_KL, **sizes(32, 8, 1140, 2560, 4, 500), "algorithm": "GRPO", "save": 100, "evaluate_every": 10,
        "reward.rewards[BeaverTails].maximum": 1.5, "reward.rewards[wmdp].wrong": 0.1,
    },
}  # fmt: skip

# -- DARLING: math_scripts and wildchat_scripts of facebookresearch/darling ----------------------------------------------
MEAN_CENTRED: Numbers = {"algorithm": "GRPO", "algorithm.std": False, **verl(1e-6, 3.0, "token-mean")}
MATHS: Numbers = {
    **MEAN_CENTRED, **NO_KL, **sizes(256, 8, 1024, 8192, 4, 390), "save": 25, "evaluate_every": 25,
    f"{EVALUATION}.samples": 8, f"{EVALUATION}.settings.temperature": 0.6, f"{EVALUATION}.settings.top_p": 0.95,
}  # fmt: skip
CHAT: Numbers = {
    **MEAN_CENTRED, **sizes(64, 8, 512, 1024, 1, 1250), "save": 200, "evaluate_every": 200, "algorithm.kl_coef": 0.001,
    "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3", f"{EVALUATION}.samples": 8,
    f"{EVALUATION}.settings.temperature": 1.0, f"{EVALUATION}.settings.top_p": 1.0, "reward.quality.sees": "chat",
}  # fmt: skip
CLASSES = "reward.distinctness.partition"
DARLING: Mapping[str, Numbers] = {
    "darling_maths_qwen3_4b": {**MATHS, f"{CLASSES}.threshold": 0.5, f"{CLASSES}.linkage": "single", f"{CLASSES}.pairs.budget": 4096},
    "darling_maths_baseline_qwen3_4b": {**MATHS, "algorithm.std": True},
    "darling_chat_llama3p1_8b": {
        **CHAT, f"{CLASSES}.threshold": 0.32, f"{CLASSES}.short_words": 5, f"{CLASSES}.pairs.budget": 2048, "reward.combine": "product",
    },
    "darling_chat_baseline_llama3p1_8b": {**CHAT, "reward.combine": "sum", "reward.distinctness_weight": 0.0},
    "darling_chat_ngram_llama3p1_8b": {**CHAT, "reward.distinctness": "ByNgrams", "reward.distinctness.n": 4, "reward.combine": "product"},
    "darling_partition_classifier": {
        "prompts_per_step": 64, "steps": 80, "optimizer.learning_rate": 2e-5, "optimizer.warmup_steps": 10,
        "optimizer.schedule": "cosine", "optimizer.final_fraction": 0.1, "save": 10, "data.both_orders": True,
        "optimizer.b2": 0.999, "optimizer.weight_decay": 0.01,
    },
}  # fmt: skip

# -- BuPO: run_code/*.sh of Trae1ounG/BuPO and arXiv 2512.19673 ----------------------------------------------------------
BUPO_BOTH: Numbers = {
    **verl(1e-6, 10.0, "token-mean"), **NO_KL, "algorithm": "GRPO", "algorithm.std": True, "save": 100, "evaluate_every": 30,
    **{f"evaluations[{name}].samples": 1 for name in ("aime24", "aime25", "amc23", "math500")},
    **{f"evaluations[{name}].greedy": False for name in ("aime24", "aime25", "amc23", "math500")},
    "evaluations[math500].settings.temperature": 1.0, "best": "eval/math500/sampled",
}  # fmt: skip
QWEN: Numbers = {**BUPO_BOTH, **sizes(128, 8, 1024, 7168, 4, 300)}
UNLIKE_GRPO: Numbers = {name: value for name, value in QWEN.items() if name != "algorithm.std"} | {"schedule": None}
LLAMA: Numbers = {**BUPO_BOTH, **sizes(128, 8, 1024, 3072, 4, 300)}
BUPO: Mapping[str, Numbers] = {
    "bupo_grpo_qwen3_4b": {**QWEN, "schedule": None},
    "bupo_qwen3_4b": {**QWEN, "schedule.layer": 5, "schedule.steps": 30},
    "bupo_grpo_llama_3b": {**LLAMA, "schedule": None},
    "bupo_llama_3b": {**LLAMA, "schedule.layer": 26, "schedule.steps": 20},
    "bupo_grpo_qwen3_8b": {**QWEN, "schedule": None},
    "bupo_qwen3_8b": {**QWEN, "schedule.layer": 5, "schedule.steps": 20},
    "bupo_grpo_llama_8b": {**LLAMA, "schedule": None},
    "bupo_llama_8b": {**LLAMA, "schedule.layer": 30, "schedule.steps": 20},
    "bupo_layer_rates_qwen3_4b": {**QWEN, "schedule": None, "optimizer.slow_above": 5, "optimizer.slow_factor": 0.1},
    "bupo_ppo_qwen3_4b": {
        **UNLIKE_GRPO,
        "algorithm": "PPO",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "critic_optimizer.learning_rate": 1e-5,
        "critic_optimizer.b2": 0.999,
        "critic_optimizer.weight_decay": 0.01,
        "critic_optimizer.max_grad_norm": 1.0,
    },
    "bupo_rloo_qwen3_4b": {**UNLIKE_GRPO, "algorithm": "RLOO"},
    "bupo_reinforce_plus_plus_qwen3_4b": {
        **UNLIKE_GRPO,
        "algorithm": "ReinforcePlusPlus",
        "algorithm.gamma": 1.0,
        "algorithm.baseline": False,
    },
}

# -- Classmate-CoT: my_scripts/*.sh of Lorenayannnnn/classmate-cot-verl --------------------------------------------------
ALONE: Numbers = {
    **verl(1e-5, 3.0, "constant"), **NO_KL, **sizes(64, 8, 1024, 3072, 4, 375), "algorithm": "GRPO", "algorithm.std": False,
    "algorithm.constant_length": 3072, "save": 10, "evaluate_every": 10, "seed": 42, "reward.sign": 1,
}  # fmt: skip
RATED: Numbers = {
    "reward.behaviour": "Judge", "reward.behaviour.sees": "output", "reward.behaviour.template": "sycophancy",
    "reward.behaviour.parser": "rating", f"{EVALUATION}.reward.monitor.template": "sycophancy_prediction",
}  # fmt: skip
TOGETHER: Numbers = {
    **ALONE, "algorithm": "GDPO", "algorithm.normalize": "sequences", "algorithm.span_parts": ("classmate",), "reward.weight": 1.0,
    "reward.reward_type": "vanilla_reward", "reward.condition": "always", "reward.classmates[0].max_length": 4096,
    "reward.classmates[0].settings.max_tokens": 4096, "reward.classmates[0].settings.temperature": 1.0,
}  # fmt: skip
CLASSMATE: Mapping[str, Numbers] = {
    "classmate_baseline_qwen3_0p6b": {**ALONE, **RATED},
    "classmate_warmup_qwen3_0p6b": {**ALONE, **RATED, "steps": 32, "save": 5, "evaluate_every": 5},
    "classmate_cot_qwen3_0p6b": {**TOGETHER, **RATED, "reward.classmates[0].weights": "own"},
    "classmate_cot_mmlu_qwen3_0p6b": {
        **TOGETHER, "reward.behaviour": "MultipleChoice", "reward.behaviour.places": ("phrase", "bracketed"),
        f"{EVALUATION}.reward.monitor.parser": "binary",
    },
    "classmate_cot_gsm8k_qwen3_0p6b": {**TOGETHER, "reward.behaviour": "Numeric", f"{EVALUATION}.limit": 100},
    "classmate_cot_math_qwen3_0p6b": {**TOGETHER, "reward.behaviour": "Maths"},
    "classmate_selfplay_qwen3_0p6b": {
        **TOGETHER, **RATED, "reward.classmates[0].weights": "policy", "reward.classmates[0].refresh_every": 0,
    },
}  # fmt: skip

# -- CS336: the handouts of stanford-cs336/assignment5-alignment, and the fork's SFT -------------------------------------
ON_MATH: Numbers = {
    "settings.temperature": 1.0, "settings.min_tokens": 4, "settings.max_tokens": 1024, "settings.stop_strings": ("</answer>",),
    f"{EVALUATION}.limit": 1024, f"{EVALUATION}.settings.max_tokens": 1024, f"{EVALUATION}.settings.min_tokens": 4,
    "optimizer.max_grad_norm": 1.0,
}  # fmt: skip
CS336: Mapping[str, Numbers] = {
    "cs336_sft_qwen2p5_math_1p5b": {
        "algorithm": "SFT", "prompts_per_step": 64, "steps": 187, "optimizer.learning_rate": 5e-6, "optimizer.weight_decay": 0.01,
        "optimizer.schedule": "cosine", "optimizer.warmup_steps": 18, "optimizer.max_grad_norm": 1.0, f"{EVALUATION}.limit": 1024,
    },
    "cs336_grpo_qwen2p5_math_1p5b": {
        **ON_MATH, **sizes(32, 8, 1024, 1024, 1, 200), "algorithm": "Reinforce", "algorithm.std": True, "algorithm.baseline": True,
        "algorithm.aggregation": "seq-mean-token-mean", "algorithm.correction": None, "epochs": 1, "evaluate_every": 10,
        "optimizer.learning_rate": 1e-5, "optimizer.b1": 0.9, "optimizer.b2": 0.95, "optimizer.weight_decay": 0.0,
        "optimizer.schedule": "constant",
    },
    "cs336_expert_iteration_qwen2p5_math_1p5b": {
        **ON_MATH, "algorithm": "ExpertIteration", "algorithm.threshold": 1.0, "steps": 5, "prompts_per_step": 512, "evaluate_every": 1,
    },
    "cs336_instruct_llama3p1_8b": {
        "algorithm": "PackedSFT", "prompts_per_step": 32, "packing.row_tokens": 512, "optimizer.learning_rate": 2e-5,
        "optimizer.schedule": "cosine", "optimizer.warmup_steps": 188, "steps": 6250,  # 3% of one epoch of 200,000 rows
    },
    "cs336_dpo_llama3p1_8b": {
        "algorithm": "DPO", "algorithm.beta": 0.1, "prompts_per_step": 64, "optimizer.learning_rate": 1e-6, "optimizer.b1": 0.0,
        "optimizer.weight_decay": 0.0, "data.template": "alpaca", "held_out.split": "val", "best": "eval/pairs/accuracy",
    },
}  # fmt: skip

TABLES: Mapping[str, Numbers] = {**TOKENBUNCHER, **DARLING, **BUPO, **CLASSMATE, **CS336}
NOTED = {
    "bupo_grpo_qwen3_4b": "its script has 8192",
    "bupo_ppo_qwen3_4b": "the critic's other numbers are verl's",
    "bupo_llama_3b": "with 30 steps; the paper has 20",
    "darling_chat_baseline_llama3p1_8b": "takes 32 prompts a step",
    "tokenbuncher_attack_obj2": "which its two epochs of 93 do not reach",
}


def resolved(name: str) -> dict[str, str]:
    """{path below the last stage: value as text}, with the run's own `seed`, `save` and `best`."""
    run, _ = command_line.build([str(GIN / f"{name}.gin")])
    found = settings_of(run)
    stage = f"stages[{run.stages[-1].name}]."
    own = {path.removeprefix(stage): value for path, value in found.items() if path.startswith(stage)}
    return own | {"seed": found["seed"], "save": found["checkpoints.every"], "best": found["checkpoints.best"]}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_recipe_has_the_published_numbers(name: str) -> None:
    found = resolved(name)
    wrong = {}
    for path, value in TABLES[name].items():
        texts = (
            {value, repr(value)} if isinstance(value, str) else {repr(value)}
        )  # the kind of a component has no quotes
        if found.get(path) not in texts:
            wrong[path] = f"is {found.get(path)}, published {value!r}"
    assert not wrong


@pytest.mark.parametrize("name", sorted(NOTED))
def test_what_differs_from_the_original_is_said_in_the_file(name: str) -> None:
    text = " ".join((GIN / f"{name}.gin").read_text().replace("#", " ").split())
    assert NOTED[name] in text


def test_every_full_size_recipe_has_a_table() -> None:
    systems = ("tokenbuncher", "darling", "bupo", "classmate", "cs336")
    files = {file.stem for system in systems for file in GIN.glob(f"{system}_*.gin") if not file.stem.endswith("_tiny")}
    assert files - {"bupo_entropy_flow"} == set(TABLES)
