"""What a resumed run may change goes on and is noted; what bends learning is refused with both values and the way out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.train import settings

ROOT = Path(__file__).parents[2]


def run(*bindings: str) -> Any:
    """A run of two stages with some bindings."""
    return command_line.build(["gin/sorting.gin"], ["RUN_DIR = 'runs/x'", *bindings])[0]


def accept(folder: Path, built: Any, step: int | None, stage: int, *, as_new: bool) -> list[settings.Change]:
    """What a start does that is not refused."""
    found = settings.compare(folder, built, step, stage, as_new=as_new)
    settings.note(folder, built, found, step, stage)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its run folder."""
    assert accept(tmp_path, run(), None, 0, as_new=False) == []
    return tmp_path


BENDS = {
    "grpo.GRPO.clip_low = 0.3": "stages[rl].algorithm.clip_low was 0.2, is 0.3",
    "grpo.GRPO.entropy_coef = 0.9": "stages[rl].algorithm.entropy_coef was 0.0, is 0.9",
    "rl/experience.SamplingParams.temperature = 0.5": "stages[rl].settings.temperature was 1.0, is 0.5",
    "SEED = 7": "seed was 0, is 7",
    "GROUP_SIZE = 5": "stages[rl].group_size was 8, is 5",
    "MINIBATCHES = 2": "stages[rl].minibatches was 4, is 2",
    "qwen3.Qwen3.layers = 3": "policy.architecture.layers was 4, is 3",
    "SFT_STEPS = 10": "stages[sft].steps was 54, is 10",
    "train.Optimizer.weight_decay = 0.5": "optimizer.weight_decay was 0.0, is 0.5",
}
FREE = {
    "rl/train.Optimizer.learning_rate = 3e-5": "stages[rl].optimizer.learning_rate",
    "SAVE_EVERY = 3": "checkpoints.every",
    "EVALUATE_EVERY = 7": "stages[rl].evaluate_every",
    "RUN_DIR = 'runs/y'": "run_dir",
    "STEPS = 999": "stages[rl].steps",
}


@pytest.mark.parametrize("binding", BENDS)
def test_a_setting_that_bends_learning_is_refused_with_both_values(folder, binding):
    before = (folder / settings.SETTINGS).read_text()
    with pytest.raises(ValueError) as refused:
        accept(folder, run(binding), 60, 1, as_new=False)
    text = str(refused.value)
    values = BENDS[binding].partition(" was ")
    assert values[0] in text and "at step 60" in text and "set RUN_DIR to another folder" in text
    assert ("--resume_as_new" in text) != binding.startswith("SFT_STEPS")
    assert f" is {values[2].partition(' is ')[2]}" in text
    assert (folder / settings.SETTINGS).read_text() == before and not (folder / settings.CHANGES).exists()


@pytest.mark.parametrize("binding", FREE)
def test_a_setting_that_bends_nothing_goes_on_and_is_noted_with_its_step(folder, binding):
    found = accept(folder, run(binding), 60, 1, as_new=False)
    assert FREE[binding] in [change.name for change in found]
    rows = [json.loads(line) for line in (folder / settings.CHANGES).read_text().splitlines()]
    (row,) = [row for row in rows if row["name"] == FREE[binding]]
    assert row["step"] == 60 and row["was"] != row["is"] and not row["bends"]
    assert accept(folder, run(binding), 80, 1, as_new=False) == [], "it is the run's own setting now"


@pytest.mark.parametrize("binding", [b for b in BENDS if not b.startswith("SFT_STEPS")])
def test_new_settings_are_taken_up_where_that_is_asked_for(folder, binding):
    found = accept(folder, run(binding), 60, 1, as_new=True)
    rows = [json.loads(line) for line in (folder / settings.CHANGES).read_text().splitlines()]
    assert found and [row["bends"] for row in rows if row["name"] in BENDS[binding]] != [False]


def forget(folder: Path, prefix: str) -> None:
    """Makes the folder one of a version that did not have the settings of these paths yet."""
    file = folder / settings.SETTINGS
    was = json.loads(file.read_text())
    kept = {name: value for name, value in was.items() if not name.startswith(prefix)}
    assert len(kept) < len(was)
    file.write_text(json.dumps(kept))


def test_a_field_that_came_since_the_folder_was_written_is_no_change_at_its_default(folder):
    """A field of a stage that holds a component, and one of a component that the folder has."""
    for prefix in ("stages[rl].router", "stages[sft].router", "stages[rl].algorithm.clip_low"):
        forget(folder, prefix)
    assert accept(folder, run(), 60, 1, as_new=False) == []
    assert not (folder / settings.CHANGES).exists()
    assert json.loads((folder / settings.SETTINGS).read_text())["stages[rl].router.replay"] == "'off'"


def test_a_field_that_came_since_the_folder_was_written_and_is_set_is_refused(folder):
    binding = "rl/train.Stage.router = @train.Router()\ntrain.Router.replay = 'R2'"
    forget(folder, "stages[rl].router")
    with pytest.raises(ValueError, match=r"stages\[rl\].router.replay was absent, is 'R2'\. Set"):
        accept(folder, run(*binding.splitlines()), 60, 1, as_new=False)


def test_steps_of_a_finished_stage_cannot_change_even_then(folder):
    with pytest.raises(ValueError, match=r"stages\[sft\].steps was 54, is 10"):
        accept(folder, run("SFT_STEPS = 10"), 60, 1, as_new=True)
    assert accept(folder, run("SFT_STEPS = 60"), 20, 0, as_new=False)


def test_the_settings_of_a_run_are_all_its_fields():
    """Every field of the stage and of what it holds has a path."""
    built = run()
    names = settings.settings_of(built)
    for field in dataclasses.fields(built.stages[1].algorithm):
        assert any(name.startswith(f"stages[rl].algorithm.{field.name}") for name in names)
    assert names["stages[rl].algorithm"] == "GRPO" and names["stages[sft].prompts_per_step"]


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("environment.url", True),
        ("environment.tools[0].url", True),
        ("environment.tools[0].cell_s", False),
        ("environment.tries", False),
        ("agent.python.sessions", True),
        ("agent.taskset.python", True),
        ("agent.taskset.first", False),
        ("agent.command", False),
        ("reward.parts[code].service.urls", True),
        ("reward.weights", False),
        ("episodes.gateway.port", True),
        ("episodes.limits.episode_s", False),
        ("max_turns", False),
    ],
)
def test_where_services_listen_may_change_and_what_they_do_may_not(name: str, free: bool):
    change = settings.Change(f"stages[rl].{name}", "1", "2")
    assert settings.refused([change], ["sft", "rl"], 1) == ([] if free else [change])
