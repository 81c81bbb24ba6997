"""Prompts that were all right or all wrong lately are drawn as seldom as the rule says, whatever is resumed."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from builders import EchoSampler, Words, make_group, make_prompt, make_rollout

from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.experience import Group, Prompt, SamplingParams
from jaxrl_llm.rewards.wrap import Wrap
from jaxrl_llm.rollouts.collect import Collector, DynamicSampling, RolloutGenerator, SampledGroups
from jaxrl_llm.rollouts.curriculum import Curriculum, CurriculumStream
from jaxrl_llm.rollouts.multihost import SharedStream

PROMPTS = [make_prompt(str(i), [i + 1], source="s") for i in range(400)]


def answered(prompt: Prompt, rewards, valid=None, roles=("sample", "sample")) -> Group:
    return make_group(
        [make_rollout(prompt, [1], role=role) for role in roles], {"r": rewards}, {"r": valid or [True] * len(rewards)}
    )


def stream(seed: int = 7, **rule: float) -> CurriculumStream:
    return CurriculumStream(PromptStream(PROMPTS, seed=seed), Curriculum(**rule))


def passes(drawing: CurriculumStream, turns: int, even: Sequence[float] = (1.0, 1.0)) -> Counter[str]:
    """How often each prompt is drawn in so many passes; the even ones always have the rewards `even`, the others are right and wrong."""
    found: Counter[str] = Counter()
    while drawing.position < turns * len(PROMPTS):
        batch = drawing.next_batch(5)
        found.update(p.id for p in batch)
        drawing.learn([answered(p, [1.0, 0.0] if int(p.id) % 2 else list(even)) for p in batch])
    return found


def draws(turns: int, share: float, least: float) -> tuple[float, float]:
    """Mean and variance of the times that a prompt which is always right (or always wrong) is drawn in so many passes, from the chain of its streaks."""
    chain = {0: 1.0}  # times drawn so far, which is its streak -> probability
    for _ in range(turns):
        after: Counter[int] = Counter()
        for streak, p in chain.items():
            chance = 1.0 if streak == 0 else max(least, share**streak)
            after[streak + 1] += p * chance
            after[streak] += p * (1 - chance)
        chain = dict(after)
    mean = sum(k * p for k, p in chain.items())
    return mean, sum((k - mean) ** 2 * p for k, p in chain.items())


@pytest.mark.parametrize("even", [(1.0, 1.0), (0.0, 0.0), (0.25, 0.25)])
@pytest.mark.parametrize(("share", "least"), [(0.5, 0.1), (0.25, 0.25), (1.0, 0.1)])
def test_prompts_are_drawn_as_often_as_derived(share, least, even):
    rule = {"share": share} if even[0] == 1 else {"share": 0.7, "wrong_share": share}
    found = passes(stream(least=least, **rule), 12, even)
    mean, variance = draws(12, share, least)
    right = [found[p.id] for p in PROMPTS if int(p.id) % 2 == 0]
    assert all(found[p.id] >= 12 for p in PROMPTS if int(p.id) % 2), "what is not all right is drawn at every turn"
    assert abs(np.mean(right) - mean) <= 4 * np.sqrt(variance / len(right)) + 5 / len(right)
    if share == 0.5:
        assert 3.5 < mean < 5.5 and np.var(right) == pytest.approx(variance, rel=0.4)


def test_samples_that_differ_bring_a_prompt_back_and_no_valid_one_changes_nothing():
    drawing, prompt = stream(), PROMPTS[3]
    drawing.next_batch(len(PROMPTS))
    for group, streak in (
        (answered(prompt, [1.0, 1.0]), 1),
        (answered(prompt, [1.0, 0.0], [True, False]), 2),
        (answered(prompt, [0.0, 0.0], [False, False]), 2),
        (answered(prompt, [1.0, 0.0], roles=("sample", "greedy")), 3),
        (answered(prompt, [1.0, 0.99]), None),
        (answered(prompt, [0.5, 0.5]), -1),
        (answered(prompt, [0.0, 1.0], [True, False]), -2),
        (answered(prompt, [0.0, 0.1]), None),
        (answered(prompt, [0.0, 0.0]), -1),
        (answered(prompt, [1.0, 1.0]), 1),
        (answered(prompt, [0.0, 0.0]), -1),
    ):
        drawing.learn([group])
        assert drawing.streaks.get(3) == streak
    assert [Curriculum().chance(c) for c in range(-2, 5)] == [1.0, 1.0, 1.0, 0.5, 0.25, 0.125, 0.1]
    assert [Curriculum(wrong_share=0.25).chance(c) for c in (-3, -2, -1, 0, 1)] == [0.1, 0.1, 0.25, 1.0, 0.5]


@pytest.mark.parametrize("even", [(1.0, 1.0), (0.0, 0.0)])
def test_draws_go_on_bit_for_bit_from_a_state(even):
    drawing, resumed = stream(wrong_share=0.5), stream(wrong_share=0.5)
    passes(drawing, 3, even)
    state = json.loads(json.dumps(drawing.state()))
    resumed.restore(state)
    assert state["streaks"] and passes(resumed, 8, even) == passes(drawing, 8, even)
    told = resumed.take()
    assert resumed.state() == drawing.state()
    assert (told["curriculum/all_right"], told["curriculum/all_wrong"]) == (even[0] / 2, 0.5 - even[0] / 2)
    other = stream(seed=8)
    with pytest.raises(ValueError, match="seed 7 -> 8"):
        other.restore(state)


def test_rows_that_processes_share_are_drawn_alike():
    alone, shared = stream(), CurriculumStream(SharedStream(PROMPTS, Processes(), seed=7), Curriculum())
    assert passes(alone, 3) == passes(shared, 3)


def loader(curriculum: Curriculum | None) -> SampledGroups:
    """80 prompts of which three in four are always right, and the others in every first sample."""
    reward = Wrap(function=lambda prompt, text: float(int(prompt.id) % 4 > 0 or text.split()[1] == "1"), name="right")
    generator = RolloutGenerator(sampler=EchoSampler(), tokenizer=Words())
    collector = Collector(
        generator=generator, reward=reward, settings=SamplingParams(max_tokens=4), group_size=2, filter=DynamicSampling(max_draws=9),
    )  # fmt: skip
    prompts = PromptStream(PROMPTS[:80], seed=1)
    stream = prompts if curriculum is None else CurriculumStream(prompts, curriculum)
    return SampledGroups(stream=stream, collector=collector, prompts=20)


def test_with_it_a_step_samples_fewer_groups_without_signal():
    """A step of 20 groups with signal is a pass over 80 prompts, of which 60 are always right."""

    def left_out(feed: SampledGroups) -> list[float]:
        async def run() -> list[float]:
            told = []
            for step in range(1, 8):
                assert len(await feed.next(step)) == 20
                told.append(feed.take()["count/groups/filtered"])
            return told

        return asyncio.run(run())

    assert sum(left_out(loader(None))) == pytest.approx(7 * 60, abs=60)
    with_it = sum(left_out(loader(Curriculum())))
    mean, variance = draws(7, 0.5, 0.1)
    assert mean < 4 and abs(with_it - 60 * mean) <= 4 * np.sqrt(60 * variance) + 60 * 0.25


@pytest.mark.parametrize("field", ["share", "wrong_share", "least"])
def test_a_chance_of_nothing_is_refused(field):
    with pytest.raises(ValueError, match=rf"train.Curriculum.{field} must be in \(0, 1\] \(got 0\)"):
        Curriculum(**{field: 0})
