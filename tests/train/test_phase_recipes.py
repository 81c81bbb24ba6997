"""The recipes of TokenBuncher and BuPO build with the numbers of their papers' scripts, and say what they are."""

from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.eval.reports import twins
from jaxrl_llm.train.phases import BuPO, TokenBuncher

GIN = Path(__file__).parents[2] / "gin"
NAMES = sorted(p.stem for system in ("tokenbuncher", "bupo") for p in GIN.glob(f"{system}_*.gin"))
NEEDED = {"bupo_entropy_flow": ["MODEL_PATH='model'", "OUT_DIR='out'"]}


def built(name: str) -> Any:
    return command_line.build([str(GIN / f"{name}.gin")], NEEDED.get(name, ()))[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_builds_and_its_header_names_paper_hardware_and_effect(name: str) -> None:
    built(name)
    lines = (GIN / f"{name}.gin").read_text().splitlines()
    header = " ".join(line for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    assert "Paper: https://arxiv.org/abs/" in header and "Hardware" in header and "xpect" in header


def test_the_defence_has_the_released_script_s_numbers() -> None:
    (stage,) = built("tokenbuncher_defence").stages
    assert (stage.steps, stage.prompts_per_step, stage.group_size, stage.minibatches) == (200, 32, 4, 4)
    assert (stage.max_prompt_tokens, stage.settings.max_tokens) == (320, 1024)
    schedule, algorithm = stage.schedule, stage.algorithm
    assert isinstance(schedule, TokenBuncher) and schedule.noiser.base == algorithm
    assert (schedule.warmup_steps, schedule.period, schedule.noiser.epsilon, schedule.noiser.weights) == (
        25,
        2,
        0.1,
        "paper",
    )
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.clip_dual) == (0.2, 0.2, 3.0)
    assert (algorithm.kl_coef, algorithm.kl_in, algorithm.kl_estimator) == (0.001, "reward", "k1")


@pytest.mark.parametrize(("name", "group", "minibatches", "kl"), [
    ("grpo", 4, 4, 0.0), ("ppo", 1, 16, 0.001), ("rloo", 4, 1, 0.0), ("reinforce_plus_plus", 1, 4, 0.001), ("obj2", 8, 4, 0.0),
])  # fmt: skip
def test_an_attack_has_the_released_script_s_numbers(name: str, group: int, minibatches: int, kl: float) -> None:
    (stage,) = built(f"tokenbuncher_attack_{name}").stages
    assert (stage.group_size, stage.minibatches, stage.algorithm.kl_coef) == (group, minibatches, kl)
    assert stage.steps == (500 if name == "obj2" else 100)


def test_bupo_and_its_baseline_differ_in_the_schedule_alone() -> None:
    published = (("qwen3_4b", 5, 30), ("qwen3_8b", 5, 20), ("llama_3b", 26, 20), ("llama_8b", 30, 20))
    for name, layer, steps in published:
        (stage,), (other,) = built(f"bupo_{name}").stages, built(f"bupo_grpo_{name}").stages
        assert isinstance(stage.schedule, BuPO) and (stage.schedule.layer, stage.schedule.steps) == (layer, steps)
        assert other.schedule is None and stage.algorithm == other.algorithm and stage.settings == other.settings
        assert (stage.prompts_per_step, stage.group_size, stage.minibatches, stage.steps) == (128, 8, 4, 300)


def test_the_defence_takes_adapters_of_the_original_s_rank_and_alpha() -> None:
    files = [str(GIN / f"{name}.gin") for name in ("tokenbuncher_defence", "adapters/lora")]
    run, _ = command_line.build(files, ["lora.LoRA.alpha = 16.0"])
    assert (run.policy.lora.rank, run.policy.lora.alpha) == (16, 16.0)
    assert "--gin='lora.LoRA.alpha = 16.0'" in (GIN / "tokenbuncher_defence.gin").read_text()


def test_attacks_and_defence_begin_from_the_exported_base() -> None:
    names = twins.names("tokenbuncher_attack_grpo")
    assert names == ["tokenbuncher_base_tiny", "tokenbuncher_attack_grpo_tiny"]
    job = twins.job(names[1], Path("/runs"), [])
    assert "--gin=START='/runs/tokenbuncher_base_tiny/model'" in job.commands[0]
    assert {"bupo_qwen_tiny", "bupo_llama_tiny", "bupo_grpo_tiny", "tokenbuncher_defence_tiny"} <= set(twins.names())
