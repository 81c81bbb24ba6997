"""A stage's environment or agent is wired to its sampler, and refused where it cannot be served."""

from types import SimpleNamespace

import pytest
from builders import EchoSampler, make_prompt

from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.environments.calculator import Calculator
from jaxrl_llm.experience import Ending, Limits, SamplingParams
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.rollouts.episodes import Episodes
from jaxrl_llm.train.build import collector_of, generator_of
from jaxrl_llm.train.stage import Stage


class Program:
    def build(self, prompt, sample: int, seed: int) -> "Program":
        return self

    async def run(self, task, endpoint) -> Ending:
        return Ending()


class OnAll(EchoSampler):
    everywhere = True


def make_stage(**fields) -> Stage:
    given = {
        "algorithm": GRPO(),
        "data": Sorting(),
        "optimizer": Optimizer(),
        "steps": 1,
        "group_size": 3,
        "prompts_per_step": 4,
    }
    return Stage(name="rl", **given | fields)


def make_trainer(sampler=None, processes: int = 1) -> SimpleNamespace:
    tokenizer = CharTokenizer(alphabet="0123456789+").load()
    return SimpleNamespace(
        sampler=sampler or EchoSampler(), tokenizer=tokenizer, processes=Processes(count=processes), players=[],
        config=SimpleNamespace(max_length=640, seed=3),
    )  # fmt: skip


def test_an_environment_may_give_the_rewards_alone():
    assert make_stage(environment=Calculator()).plays and make_stage(agent=Program()).plays
    with pytest.raises(ValueError, match=r"stage 'rl' has no reward: set Stage\.reward"):
        make_stage()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"environment": Calculator(), "agent": Program()}, "stage 'rl' has an environment and an agent"),
        ({"environment": Calculator(), "branches_kept": 0}, r"branches_kept must be >= 1 \(got 0\)"),
        ({"environment": Calculator(), "max_turns": 0}, r"max_turns must be >= 1 \(got 0\)"),
    ],
)
def test_contradictions_are_refused(fields, match: str):
    with pytest.raises(ValueError, match=match):
        make_stage(**fields)


@pytest.mark.parametrize("bad", [{"concurrency": 0}, {"extra": -1}, {"tries": 0}, {"stop_after": 0}, {"close_s": 0}])
def test_wrong_episodes_are_refused_with_their_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Episodes(**bad)


def test_the_player_has_the_stages_limits_and_its_sampler():
    episodes = Episodes(limits=Limits(max_turns=5, step_s=7.0), concurrency=2, extra=1, weights={"won": 0.5})
    trainer = make_trainer()
    stage = make_stage(environment=Calculator(), max_turns=3, episodes=episodes, settings=SamplingParams(max_tokens=9))
    generator = generator_of(stage, trainer, extra=episodes.extra)
    player = generator.player
    assert trainer.players == [player] and player.service.sampler is trainer.sampler is generator.sampler
    assert (player.config.limits.max_turns, player.config.limits.step_s) == (3, 7.0)
    assert (generator.slots.concurrency, generator.slots.extra) == (2, 1)
    assert player.service.settings.stop_token_ids == (trainer.tokenizer.eos_token_id,)
    collector = collector_of(stage, generator, trainer)
    assert collector.reward is None and collector.least == 2 and collector.weights == {"won": 0.5}
    assert generator_of(stage, make_trainer()).slots.extra == 0, "evaluations leave nothing out"
    assert generator_of(make_stage(environment=Calculator()), make_trainer()).player.config.limits.max_turns == 8


def test_a_sampler_on_the_devices_of_all_processes_is_refused_by_name():
    assert generator_of(make_stage(environment=Calculator()), make_trainer(OnAll())).player is not None
    for stage, what in (
        (make_stage(environment=Calculator()), "an environment"),
        (make_stage(agent=Program()), "an agent"),
    ):
        with pytest.raises(
            ValueError, match=f"stage 'rl' has {what}, whose .* OnAll samples on all 2 processes at once: include gin/"
        ):
            generator_of(stage, make_trainer(OnAll(), processes=2))
    assert generator_of(make_stage(agent=Program()), make_trainer(processes=2)).player is not None
    assert make_prompt("p").prefix.tolist() == [1, 2]
