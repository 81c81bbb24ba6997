"""Every recipe of the five systems builds, says in its header what it is, and has a twin; every twin is a recipe's."""

from pathlib import Path

import pytest

from jaxrl_llm import command_line

GIN = Path(__file__).parents[2] / "gin"
SYSTEMS = ("darling", "classmate", "cs336")
RECIPES = sorted(p.stem for system in SYSTEMS for p in GIN.glob(f"{system}_*.gin"))
TWINS = [name for name in RECIPES if name.endswith("_tiny")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_builds_and_says_what_it_is(name: str) -> None:
    run, _ = command_line.build([str(GIN / f"{name}.gin")])
    assert Path(run.run_dir).name == name
    header = []
    for line in (GIN / f"{name}.gin").read_text().splitlines():
        if not line.startswith("#"):
            break
        header.append(line)
    text = " ".join(header)
    assert "Shows:" in text or "what it shows:" in text, "the header says what the run should show"
    assert "Hardware" in text or "hardware" in text, "the header says what it needs"


def test_every_system_has_twins() -> None:
    assert {name.split("_")[0] for name in TWINS} == set(SYSTEMS)


@pytest.mark.parametrize(
    "binding",
    [
        "LEARNING_RATE=3e-6",
        "reinforce.Reinforce.baseline=False",
        "reinforce.Reinforce.std=False",
        "reinforce.Reinforce.aggregation='constant'",
        "ALGORITHM=@grpo.GRPO()",
        "reinforce.Reinforce.objective='ratio'",
        "EPOCHS=2",
        "MINIBATCHES=4",
    ],
)
def test_every_ablation_of_cs336_is_a_line_for_recipe_and_twin(binding: str) -> None:
    for name in ("cs336_grpo_qwen2p5_math_1p5b", "cs336_grpo_tiny"):
        command_line.build([str(GIN / f"{name}.gin")], [binding])
    said = (GIN / "cs336_grpo_qwen2p5_math_1p5b.gin").read_text().splitlines()
    assert any(line.startswith("#") and binding in line for line in said)


def test_a_classmate_has_the_original_s_4096_tokens() -> None:
    run, _ = command_line.build(
        [str(GIN / name) for name in ("classmate_baseline_qwen3_0p6b.gin", "rewards/classmate.gin")]
    )
    (mate,) = run.stages[-1].reward.classmates
    assert (mate.max_length, mate.settings.max_tokens) == (4096, 4096)
