"""Feeds give a step's groups and a place to resume from: samples, demonstrations and pairs."""

import asyncio
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from builders import EchoSampler, Words, make_group, make_prompt, make_rollout

from jaxrl_llm.algorithms.dpo import DPO
from jaxrl_llm.algorithms.kto import KTO
from jaxrl_llm.data.pipeline import Encoder, PromptStream
from jaxrl_llm.experience import Prompt, SamplingParams
from jaxrl_llm.learner.score import means_of_rollouts
from jaxrl_llm.protocols import GroupLoader
from jaxrl_llm.rewards.wrap import Wrap
from jaxrl_llm.rollouts.collect import Collector, RolloutGenerator, SampledGroups
from jaxrl_llm.rollouts.offline import OfflineGroups, demonstrations, documents, given, pairs


class Letters:
    """A tokenizer of one letter a token, 1 to 26; 0 ends a sequence."""

    eos_token_id, bos_token, chat_template, name_or_path = 0, None, None, "letters"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 96 for letter in text]}


def encoder(**fields) -> Encoder:
    return Encoder(tokenizer=Letters(), max_prompt_tokens=4, **fields)


def row(name: str, response: str | None = None, **extra: str | bool) -> Prompt:
    return Prompt(id=name, text=name, response=response, extra=extra)


def sample_feed() -> SampledGroups:
    reward = Wrap(function=lambda prompt, text: float(len(text)), name="length")
    generator = RolloutGenerator(sampler=EchoSampler(), tokenizer=Words())
    collector = Collector(
        generator=generator, reward=reward, settings=SamplingParams(max_tokens=4), group_size=2, seed=1
    )
    stream = PromptStream([make_prompt(str(i), [i]) for i in range(5)], seed=3)
    return SampledGroups(stream=stream, collector=collector, prompts=3)


def step_of(feed: GroupLoader, step: int) -> list[tuple[str, list[list[int]]]]:
    groups = asyncio.run(feed.next(step))
    return [(g.rollouts[0].prompt.id, [r.tokens.tolist() for r in g.rollouts]) for g in groups]


def test_a_feed_of_samples_goes_on_from_its_state():
    feed, other = sample_feed(), sample_feed()
    assert isinstance(feed, GroupLoader)
    first = [step_of(feed, 1)]
    state = feed.state()
    rest = [step_of(feed, step) for step in (2, 3)]
    other.restore(state)
    assert [step_of(other, step) for step in (2, 3)] == rest
    names = [name for groups in first + rest for name, _ in groups]
    assert len(names) == 9 and sorted(names[:5]) == list("01234")  # an epoch has every prompt once
    assert other.take()["data/epoch"] == feed.take()["data/epoch"] == 9 / 5


def test_a_demonstration_is_the_only_rollout_of_its_group():
    rows = demonstrations(encoder(), [row("ab", "c"), row("abcde", "c"), row("b", "dd"), row("c")])
    feed = OfflineGroups(stream=PromptStream(rows), rows=2)
    assert isinstance(feed, GroupLoader)
    groups = sorted(asyncio.run(feed.next(0)), key=lambda g: len(g.rollouts[0].tokens))
    assert [[r.tokens.tolist() for r in g.rollouts] for g in groups] == [[[3, 0]], [[4, 4, 0]]]
    assert [g.rollouts[0].prompt.tokens.tolist() for g in groups] == [[1, 2], [2]]
    assert all(g.scores.parts == {} and g.valid().all() for g in groups)
    assert feed.take() == {"data/epoch": 1.0}
    state = feed.state()
    asyncio.run(feed.next(1))
    feed.restore(state)
    assert feed.state() == state


def test_a_pair_is_the_preferred_response_and_then_the_rejected_one():
    found = pairs(encoder(), [row("a", "b", rejected="cc"), row("abcde", "b", rejected="c")])
    assert [[r.tokens.tolist() for r in pair.rollouts] for pair in found] == [[[2, 0], [3, 3, 0]]]
    (group,) = asyncio.run(OfflineGroups(stream=PromptStream(found), rows=1).next(0))
    assert group.scores.parts["log/side"].tolist() == [1, -1]
    assert group.total().tolist() == [0, 0] and group.valid().all()


def test_a_row_without_a_rejected_response_and_pairs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"row 'a' has no rejected response: .* Prompt.extra\['rejected'\]"):
        pairs(encoder(), [row("a", "b")])
    with pytest.raises(ValueError, match=r"none of 1 pairs is left after encoding .*'dropped/long_response': 1"):
        pairs(encoder(max_response_tokens=2), [row("a", "b", rejected="ccc")])
    with pytest.raises(ValueError, match="row 'a' prefers a response to itself: both sides are 'b'"):
        pairs(encoder(), [row("a", "b", rejected="b")])
    with pytest.raises(ValueError, match=r"row 'a' has no response: .* columns prompt, chosen and rejected"):
        pairs(encoder(), [row("a", rejected="b")])


def test_responses_with_a_label_stand_alone_beside_pairs_where_the_algorithm_takes_them():
    rows = [row("a", "b", desirable=False), row("b", "c", desirable=True), row("c", "d", rejected="e")]
    found = given(encoder(), rows, KTO())
    assert [g.scores.parts["log/side"].tolist() for g in found] == [[-1], [1], [1, -1]]
    assert [g.rollouts[0].tokens.tolist() for g in found] == [[2, 0], [3, 0], [4, 0]]
    with pytest.raises(ValueError, match="row 'a' has no rejected response"):
        given(encoder(), rows, DPO())
    with pytest.raises(ValueError, match=r"or a label True or False in Prompt.extra"):
        given(encoder(), [row("a", "b", desirable="yes")], KTO())


def test_documents_are_joined_and_cut_into_chunks_that_predict_across_borders():
    rows = [row("ab", "c"), row("d", "ef"), row("gh", "i")]
    found = documents(encoder(), rows, length=4, seed=0)
    texts = {"ab": [1, 2, 3, 0], "d": [4, 5, 6, 0], "gh": [7, 8, 9, 0]}
    orders = [[x for name in names for x in texts[name]] for names in permutations(texts)]
    chunks = [[*g.rollouts[0].prompt.tokens, *g.rollouts[0].tokens] for g in found]
    assert len(chunks) == (12 - 1) // 4  # as CS336 counts them: the last token begins no chunk
    (stream,) = [o for o in orders if o[:5] == chunks[0]]
    assert chunks == [stream[0:5], stream[4:9]]  # the token at a border is predicted once and begins the next chunk
    assert all(g.rollouts[0].mask.all() and len(g.rollouts[0].tokens) == 4 for g in found)
    (unshuffled, _) = documents(encoder(), rows, 4, None)
    assert unshuffled.rollouts[0].tokens.tolist() == [2, 3, 0, 4]
    firsts = {str(documents(encoder(), rows, 4, seed)[0].rollouts[0].tokens) for seed in range(8)}
    assert len(firsts) > 1
    with pytest.raises(
        ValueError, match=r"have 12 tokens and a chunk of 12 needs 13: lower its length .train.Packing.row_tokens"
    ):
        documents(encoder(), rows, 12, 0)


def test_statistics_of_a_rollout_are_means_over_the_tokens_the_policy_chose():
    prompt = make_prompt()
    groups = [
        make_group([make_rollout(prompt, [1, 2, 3], mask=[1, 0, 1]), make_rollout(prompt, [1])], {"r": [0, 0]}),
        make_group([make_rollout(prompt, [1, 2], mask=[0, 0])], {"r": [0]}),
    ]
    stream = np.array([[1, 50, 3, 90], [7, 90, 90, 90], [90, 90, 90, 90], [90, 90, 90, 90]], np.float32)
    first, second = means_of_rollouts(groups, {"entropy": stream, "old_logprobs": -stream})
    assert first["entropy"].tolist() == [2, 7] and first["old_logprobs"].tolist() == [-2, -7]
    assert second["entropy"].tolist() == [0] and second["entropy"].dtype == np.float64
    swapped = means_of_rollouts([replace(groups[1]), groups[0]], {"entropy": stream})
    assert swapped[1]["entropy"].tolist() == [48.5, 90]  # rows follow the order of the groups
