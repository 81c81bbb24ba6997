"""Sessions: a tree of exact token prefixes, whose branches are what the sampler saw; each sampled token is learned from once."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from agents.scripted import Scripted, check_branches, random_script

from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.agents.session import Asked, Ended, Session, TooLong, Untrainable
from jaxrl_llm.experience import Completion, SamplingParams

SETTINGS = SamplingParams(max_tokens=8)


def session(**limits) -> Session:
    return Session(id="s", key="k", settings=SETTINGS, seed=5, **{"max_length": 1000, **limits})


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def drawn(*tokens: int, finish="stop", version=2) -> Completion:
    logprobs = -np.asarray(tokens, np.float32) / 8
    return Completion(
        tokens=ids(*tokens), logprobs=logprobs, versions=np.full(len(tokens), version, np.int32), finish=finish
    )


def said(of: Session, prompt: np.ndarray, completion: Completion, served: int = 2, adapter: str = "") -> Asked:
    asked = of.begin(prompt, adapter=adapter)
    of.finish(asked, completion, served)
    return asked


def test_turns_that_continue_one_another_are_one_branch():
    one = session()
    said(one, ids(1, 2), drawn(3, 4))
    said(one, ids(1, 2, 3, 4, 50, 51), drawn(6, version=4), served=4)
    said(one, ids(1, 2, 3, 4, 50, 51, 6, 52), drawn(7, 8, finish="length"), served=5)
    (branch,) = one.branches()
    assert branch.prefix.tolist() == [1, 2]
    assert branch.tokens.tolist() == [3, 4, 50, 51, 6, 52, 7, 8]
    assert branch.mask.tolist() == [True, True, False, False, True, False, True, True]
    assert branch.sampler_logprobs.tolist() == [-3 / 8, -4 / 8, 0, 0, -6 / 8, 0, -7 / 8, -1]
    assert branch.versions.tolist() == [2, 2, 4, 4, 4, 5, 2, 2]
    assert branch.finish == "length"
    assert [(t.start, t.end, t.call) for t in branch.turns] == [(0, 2, 0), (4, 5, 1), (6, 8, 2)]
    assert one.metrics() == {
        "calls": 3, "sampled_tokens": 5, "branches": 1, "branch_tokens": 10, "duplicated_tokens": 0
    }  # fmt: skip


def test_what_loaded_adapters_say_stays_in_the_branch_and_is_not_learned_from():
    one = session()
    said(one, ids(1, 2), drawn(3, 4))
    said(one, ids(1, 2, 3, 4, 50), drawn(6, 7), adapter="other")
    said(one, ids(1, 2, 3, 4, 50, 6, 7, 51), drawn(8))
    (branch,) = one.branches()
    assert branch.tokens.tolist() == [3, 4, 50, 6, 7, 51, 8]
    assert branch.mask.tolist() == [True, True, False, False, False, False, True]
    assert one.metrics()["adapter_calls"] == 1 and [call.adapter for call in one.calls] == ["", "other", ""]


def test_branches_that_loaded_adapters_alone_go_on_with_are_left_out():
    """The policy's answer 3 is learned from once, in the branch that ends first; a conversation with the adapters alone is none."""
    one = session()
    said(one, ids(1, 2), drawn(3))
    said(one, ids(1, 2, 3, 50), drawn(4))
    said(one, ids(1, 2, 3, 60), drawn(5), adapter="other")
    said(one, ids(9), drawn(5, 6), adapter="other")
    assert [(b.tokens.tolist(), b.mask.tolist()) for b in one.branches()] == [([3, 50, 4], [True, False, True])]
    other = session()
    said(other, ids(1, 2), drawn(3))
    said(other, ids(1, 2, 3, 60), drawn(5), adapter="other")
    said(other, ids(1, 2, 3, 50), drawn(4))
    assert [(b.tokens.tolist(), b.mask.tolist()) for b in other.branches()] == [
        ([3, 60, 5], [True, False, False]), ([3, 50, 4], [False, False, True])
    ]  # fmt: skip
    alone = session()
    said(alone, ids(1, 2), drawn(3), adapter="other")
    assert alone.branches() == ()


def test_a_fork_learns_from_shared_tokens_in_the_first_branch_alone():
    one = session()
    said(one, ids(1, 2), drawn(3, 4))
    said(one, ids(1, 2, 3, 4, 50), drawn(6))
    said(one, ids(1, 2, 3, 4, 60), drawn(7))
    first, second = one.branches()
    assert first.tokens.tolist() == [3, 4, 50, 6] and first.mask.tolist() == [True, True, False, True]
    assert second.tokens.tolist() == [3, 4, 60, 7] and second.mask.tolist() == [False, False, False, True]
    assert [t.call for t in second.turns] == [0, 2]
    assert one.metrics() == {
        "calls": 3, "sampled_tokens": 4, "branches": 2, "branch_tokens": 12, "duplicated_tokens": 4, "fork/history": 1
    }  # fmt: skip


ROOT = (101, 102, 103, 104, 105)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ((9, 9, 9), "prompt"),
        ((101, 102, 9, 104, 105, 3, 4, 50), "prompt"),
        ((*ROOT[:4], 9, 50), "answer"),  # the prompt's last token is another one with what follows
        ((*ROOT, 3, 9, 50), "answer"),
        ((*ROOT, 3, 4, 50, 51, 52, 6, 9, 53), "cut_off"),
        ((*ROOT, 3, 4, 60), "history"),
        (ROOT, "repeated"),
        ((*ROOT, 3, 4, 50, 51, 52), "repeated"),
        ((*ROOT, 3, 4, 50, 51, 52, 6, 7, 53), ""),
    ],
)
def test_forks_are_counted_by_their_reason(prompt, reason):
    one = session()
    said(one, ids(*ROOT), drawn(3, 4))
    said(one, ids(*ROOT, 3, 4, 50, 51, 52), drawn(6, 7, finish="length"))
    assert said(one, ids(*prompt), drawn(8)).fork == reason
    assert {name: n for name, n in one.counters.items() if n} == ({f"fork/{reason}": 1} if reason else {})


def test_the_longest_prefix_is_the_parent():
    one = session()
    said(one, ids(1), drawn(2))
    said(one, ids(1, 2), drawn(3))
    assert said(one, ids(1, 2, 3, 4), drawn(5)).parent.number == 1
    assert said(one, ids(1, 2, 4), drawn(5)).parent.number == 0
    assert said(one, ids(2, 3), drawn(5)).parent is None


def test_limits_end_a_session():
    one = session(max_calls=2, max_tokens=3, max_length=6)
    with pytest.raises(TooLong, match=r"1 to 5 tokens.*got 6"):
        one.begin(ids(1, 2, 3, 4, 5, 6))
    said(one, ids(1), drawn(2, 3))
    assert one.left() == 1
    waiting = one.begin(ids(1, 2, 3, 4))
    one.running(waiting, lambda: None)
    with pytest.raises(Ended, match="2 calls") as refused:
        one.begin(ids(5))
    assert refused.value.limit == "max_calls"
    one.give_up(waiting)
    said(one, ids(5), drawn(6))
    few = session(max_tokens=2)
    said(few, ids(1), drawn(2, 3))
    with pytest.raises(Ended, match="2 tokens") as refused:
        few.begin(ids(5))
    assert refused.value.limit == "max_tokens"
    few.close()
    with pytest.raises(Ended) as refused:
        few.begin(ids(5))
    assert refused.value.limit == "closed"


@pytest.mark.parametrize(
    ("change", "said_of_it"),
    [
        ({"logprobs": np.asarray([-1, np.nan], np.float32)}, "not finite"),
        ({"logprobs": np.asarray([-1, -np.inf], np.float32)}, "not finite"),
        ({"logprobs": np.asarray([-1, 2e-6], np.float32)}, "above 0"),
        ({"logprobs": np.asarray([-1], np.float32)}, "lengths"),
        ({"versions": np.asarray([1, -1], np.int32)}, "no version"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(change, said_of_it):
    one = session()
    said(one, ids(1), drawn(2, 3))
    said(one, ids(1, 2, 3, 4), replace(drawn(5, 6), **change))
    with pytest.raises(Untrainable, match=f"call 1.*{said_of_it}"):
        one.branches()


def test_log_probs_that_are_all_zero_are_none():
    one = session()
    zeros = replace(drawn(2, 3, 4, 5), logprobs=np.zeros(4, np.float32))
    said(one, ids(1), zeros)
    said(one, ids(7), zeros)
    with pytest.raises(Untrainable, match=r"all 8 sampled tokens are 0\.0"):
        one.branches()
    said(one, ids(8), drawn(2))
    assert len(one.branches()) == 3


def test_a_call_that_was_given_up_leaves_no_trace_and_its_retry_draws_the_same():
    one = session()
    first = one.begin(ids(1, 2))
    one.give_up(first)
    again = one.begin(ids(1, 2))
    other = one.begin(ids(1, 2))
    assert one.draw_seed(first) == one.draw_seed(again) != one.draw_seed(other)
    assert one.draw_seed(again, 7) == one.draw_seed(other, 7) != one.draw_seed(other, 8)
    assert one.branches() == ()


def test_an_answer_that_nobody_read_is_dropped_unless_it_was_continued():
    one = session()
    said(one, ids(1), drawn(2))
    said(one, ids(1, 2, 3), drawn(4))
    first, second = one.calls
    one.drop(first)
    assert one.calls == (first, second)
    one.drop(second)
    assert one.calls == (first,)
    one.restore(second)
    assert len(one.branches()) == 1 and one.calls == (first, second)


async def conversation(service: TokenService, chance: random.Random) -> Session:
    """A conversation of token ids: turns that go on, edit, cut off, repeat, run side by side, and change the beginning."""
    one = service.open(seed=chance.randrange(1 << 30))
    some = lambda: ids(*(chance.randrange(20) for _ in range(chance.randint(1, 6))))  # noqa: E731
    prompts = [np.concatenate([some(), some()])]
    for _ in range(chance.randint(1, 7)):
        kind = chance.randrange(7)
        prompt = prompts[-1]
        if kind == 1:  # edited
            prompt = prompt.copy()
            prompt[chance.randrange(len(prompt))] = chance.randrange(20)
        elif kind == 2:  # cut off
            prompt = prompt[: chance.randint(1, len(prompt))]
        elif kind == 3:  # repeated
            prompt = chance.choice(prompts)
        elif kind == 4:  # another beginning
            prompt = np.concatenate([some(), prompt[2:], some()])
        if kind == 5:  # side by side
            both = [prompt, np.concatenate([prompt, some()])]
            await asyncio.gather(*(service.continue_(one, p, max_tokens=chance.choice((None, 1, 3))) for p in both))
            prompts += both
            continue
        done = await service.continue_(one, prompt, max_tokens=chance.choice((None, 2)))
        prompts.append(np.concatenate([prompt, done.tokens, some()]).astype(np.int32))
    return one


@pytest.mark.parametrize("seed", range(20))
def test_branches_of_random_conversations_are_what_the_sampler_saw(seed):
    """Ten conversations for each seed."""

    async def main():
        forks = 0
        for number in range(10):
            sampler = Scripted(random_script(20))
            service = TokenService(sampler, replace(SETTINGS, stop_token_ids=(7,)))
            one = await conversation(service, random.Random(100 * seed + number))
            check_branches(one.branches(), sampler)
            forks += len(one.branches()) > 1
        return forks

    assert asyncio.run(main()) > 2
