"""Groups keep their prompts and seeds; an environment's words are masked out and count towards the token limit."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from builders import EchoSampler, Words, answer_of, make_prompt

from jaxrl_llm.experience import Prompt, Rollout, SamplingParams, seed_of
from jaxrl_llm.protocols import Sampler
from jaxrl_llm.rollouts.collect import RolloutGenerator

SETTINGS = SamplingParams(max_tokens=20)


@dataclass
class Counting:
    """Answers `words` as often as `turns` says, and remembers what it saw.

    Attributes:
      words: what it says.
      turns: answers before it is done.
      seen: (text, state) of each step.
    """

    words: str = "50 51"
    turns: int = 2
    seen: list[tuple[str, int | None]] = field(default_factory=list)

    def step(self, rollout: Rollout, state: int | None) -> tuple[str | None, int]:
        self.seen.append((rollout.text, state))
        count = state or 0
        return (self.words if count < self.turns else None), count + 1


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


def test_an_environments_words_are_masked_out_and_the_next_turn_follows_them():
    environment = Counting()
    generator = RolloutGenerator(sampler=EchoSampler(), tokenizer=Words(), environment=environment)
    rollout = ask(generator, n=1)[0][0]
    first = answer_of(np.array([1, 2]), 0, 11)
    second = answer_of(np.array([1, 2, *first, 50, 51]), 0, seed_of(seed_of(11, 0), 1))
    third = answer_of(np.array([1, 2, *first, 50, 51, *second, 50, 51]), 0, seed_of(seed_of(11, 0), 2))
    assert rollout.tokens.tolist() == [*first, 50, 51, *second, 50, 51, *third]
    assert rollout.mask.tolist() == [True] * 3 + ([False] * 2 + [True] * 3) * 2
    assert rollout.sampler_logprobs.tolist() == [-1, -2, -3, *[0, 0, -1, -2, -3] * 2]
    assert rollout.versions.tolist() == [3] * 13 and rollout.finish == "stop"
    texts = [text for text, _ in environment.seen]
    assert " ".join(map(str, first)) in texts and rollout.text in texts
    assert [state for text, state in environment.seen if text.startswith(" ".join(map(str, first)))] == [None, 1, 2]


def test_rollouts_of_a_group_go_on_with_seeds_of_their_own():
    sampler = EchoSampler()
    ask(RolloutGenerator(sampler=sampler, tokenizer=Words(), environment=Counting()), n=3)
    turns = [seeds[0] for prefixes, n, _, seeds in sampler.calls if n == 1]
    assert len(turns) == 3 * 3 * 2 and len(set(turns)) == len(turns)


def test_turns_end_at_max_turns():
    sampler = EchoSampler()
    groups = ask(RolloutGenerator(sampler=sampler, tokenizer=Words(), environment=Counting(turns=9), max_turns=2), n=1)
    assert [len(group[0].tokens) for group in groups.values()] == [8, 8, 8]


@pytest.mark.parametrize(
    ("max_tokens", "length", "finish", "asked"),
    [
        (2, 2, "length", []),  # cut off in the first turn: the environment is not asked
        (5, 3, "length", []),  # its words would fill the limit: they are left out
        (6, 6, "length", [1]),
        (8, 8, "length", [3]),  # the words after the second turn do not fit
        (10, 8, "length", [5]),
        (13, 13, "stop", [8, 3]),
    ],
)
def test_the_token_limit_holds_for_the_whole_transcript(max_tokens, length, finish, asked):
    sampler = EchoSampler()
    generator = RolloutGenerator(sampler=sampler, tokenizer=Words(), environment=Counting())
    rollout = ask(generator, n=1, settings=SamplingParams(max_tokens=max_tokens, min_tokens=2))[0][0]
    assert (len(rollout.tokens), rollout.finish) == (length, finish)
    calls = [s for prefixes, n, s, _ in sampler.calls[1:] if prefixes[0][:2].tolist() == [1, 2]]
    assert [s.max_tokens for s in calls] == asked
    assert [s.min_tokens for s in calls] == [min(2, limit) for limit in asked]


def test_whoever_gives_up_leaves_no_conversation_behind():
    class Stuck(EchoSampler):
        def sample(self, prefixes, n, settings, seeds):
            return super().sample(prefixes, n, settings, seeds) if len(prefixes) > 1 else self.never()

        async def never(self):
            await asyncio.Event().wait()
            yield

    async def run() -> None:
        generator = RolloutGenerator(sampler=Stuck(), tokenizer=Words(), environment=Counting())
        groups = generator.groups([make_prompt("a", [1, 2]), make_prompt("b", [3])], 2, SETTINGS, [11, 22])
        asked = asyncio.ensure_future(anext(groups))
        await asyncio.wait({asked}, timeout=0.05)
        asked.cancel()
        await asyncio.wait({asked})
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


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
