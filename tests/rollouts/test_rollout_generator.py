"""Groups keep their prompts and seeds, and are counted by the way they ended."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from builders import EchoSampler, Words, make_prompt

from jaxrl_llm.experience import Prompt, Rollout, SamplingParams, seed_of
from jaxrl_llm.protocols import Sampler
from jaxrl_llm.rollouts.collect import RolloutGenerator

SETTINGS = SamplingParams(max_tokens=20)


def ask(
    generator: RolloutGenerator, n: int = 2, settings: SamplingParams = SETTINGS, **fields
) -> dict[int, list[Rollout]]:
    prompts = [make_prompt("a", [1, 2]), make_prompt("b", [3]), make_prompt("c", [4, 4, 4])]

    async def all_groups() -> list[tuple[int, list[Rollout]]]:
        return [group async for group in generator.groups(prompts, n, settings, [11, 22, 33], **fields)]

    groups = asyncio.run(all_groups())
    assert len(groups) == len(dict(groups)) == 3
    return dict(groups)


def test_the_fake_sampler_is_a_sampler():
    assert isinstance(EchoSampler(), Sampler)


@pytest.mark.parametrize("order", [0, 1])
def test_a_group_belongs_to_its_prompt_and_seed_whenever_it_finishes(order):
    generator = RolloutGenerator(sampler=EchoSampler(order), tokenizer=Words())
    groups = ask(generator, role="greedy")
    for index, (prefix, seed) in enumerate((([1, 2], 11), ([3], 22), ([4, 4, 4], 33))):
        for i, rollout in enumerate(groups[index]):
            tokens = [sum(prefix) + 1, i + 1, seed + 1]
            assert rollout.prompt.id == "abc"[index] and rollout.prompt.tokens.tolist() == prefix
            assert rollout.tokens.tolist() == tokens and rollout.text == " ".join(map(str, tokens))
            assert rollout.mask.all() and rollout.sampler_logprobs.tolist() == [-1, -2, -3]
            assert rollout.versions.tolist() == [3, 3, 3] and (rollout.finish, rollout.role) == ("stop", "greedy")
    assert generator.counters == {"finish/stop": 6, "empty": 0}


def test_rollouts_are_counted_by_the_way_they_ended_and_where_they_say_nothing():
    class Silent(EchoSampler):
        def _completion(self, prefix, i, settings, seed):
            return replace(super()._completion(prefix, i, settings, seed), tokens=np.zeros(3, np.int32))

    generator = RolloutGenerator(sampler=Silent(), tokenizer=Words())
    ask(generator)
    ask(generator, settings=SamplingParams(max_tokens=2))
    assert generator.counters == {"finish/stop": 6, "finish/length": 6, "empty": 12}


def test_a_prompt_without_tokens_is_refused():
    generator = RolloutGenerator(sampler=EchoSampler(), tokenizer=Words())

    async def first() -> None:
        async for _ in generator.groups([Prompt(id="raw", text="?")], 1, SETTINGS, [0]):
            pass

    with pytest.raises(ValueError, match="prompt 'raw' was not encoded"):
        asyncio.run(first())


def test_seeds_depend_on_every_number_and_fit_31_bits():
    seeds = [seed_of(a, b, c) for a in range(8) for b in range(8) for c in range(8)]
    assert len(set(seeds)) == 512 and all(0 <= s < 2**31 for s in seeds) and seed_of(1, 2) != seed_of(2, 1)
    assert seed_of(1, 2, 3) == int(np.random.SeedSequence([1, 2, 3]).generate_state(1)[0]) // 2
