"""Rollouts as rows for people: texts, rewards and the streams of their tokens, bounded in size."""

import gzip

import numpy as np
from builders import Words, make_group, make_prompt, make_rollout

from jaxrl_llm.algorithms.batch import Advantages
from jaxrl_llm.experience import Group, Prompt
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.metrics import rollout_rows

NAN = float("nan")


def two_groups() -> list[Group]:
    """Totals 1, 3 and invalid; then 2 and 2 of a chat prompt, the first with a token of the environment's."""
    a = make_prompt("a", [1, 2], reference="4")
    b = Prompt(id="b", messages=[{"role": "user", "content": "1+1?"}], tokens=np.array([3], np.int32))
    first = [make_rollout(a, [4] * n, text=f"t{n}", logprobs=[-0.125 * n] * n) for n in (1, 2, 6)]
    second = [make_rollout(b, [5, 6], mask=[1, 0], finish="length"), make_rollout(b, [5], role="greedy")]
    parts = {"main": [1, 2, NAN], "style": [0, 1, 7], "log/judge": [5, NAN, 1]}
    valid = {"main": [True, True, False], "log/judge": [True, False, True]}
    return [make_group(first, parts, valid), make_group(second, {"main": [2, 2]})]


def build(groups: list[Group]) -> Batch:
    packing = Packing(row_tokens=8, rows=2, sequences_per_row=4)
    return Batch.build(groups, packing, minibatches=1, sources=[""], response_tokens=6, capacity=6)


STREAMS = {"old_logprobs": -np.arange(36, dtype=np.float32).reshape(6, 6) / 3, "entropy": np.full((6, 6), np.inf)}
ASSIGNED = Advantages(
    advantages=np.repeat(np.arange(6, dtype=np.float32)[:, None], 6, axis=1), loss_mask=np.ones((6, 6), bool)
)


def rows(rollouts: int = 9, tokens: int = 9, streams=STREAMS) -> list[rollout_rows.Row]:
    return rollout_rows.of_step(
        build(two_groups()), streams, ASSIGNED, tokenizer=Words(), rollouts=rollouts, tokens=tokens
    )


def test_rollouts_are_shown_with_what_a_reader_asks_for():
    found = rows()
    assert [row["response"] for row in found] == ["t1", "t2", "t6", "", ""]
    assert {n: x for n, x in found[1].items() if n != "streams"} == {
        "prompt": "a", "group": 0, "role": "sample", "question": "a", "response": "t2", "reference": "4", "source": "",
        "reward": 3.0, "finish": "stop", "tokens": 2, "parts": {"main": 2, "style": 1, "log/judge": None},
    }  # fmt: skip
    assert found[2]["reward"] is None
    assert (found[3]["question"], found[3]["finish"], found[4]["role"]) == ("1+1?", "length", "greedy")
    assert len(rows(rollouts=2)) == 2


def test_each_token_has_the_values_of_its_own_sequence_and_place_and_none_where_the_policy_did_not_choose_it():
    found = rows()[3]["streams"]
    assert found["token"] == ["5", " 6"]
    assert found["logprob"] == [-6.0, None]  # sequence 3 begins with the stream's entry 18, of which a third
    assert found["advantage"] == [3.0, None]
    assert found["sampler_logprob"] == [-0.5, None]
    assert found["entropy"] == [None, None]  # not finite


def test_values_are_cut_at_the_most_tokens_and_the_rest_is_text():
    found = rows(tokens=4)[2]["streams"]
    assert found["token"] == ["4", " 4", " 4", " 4"] and found["rest"] == "4 4"
    assert found["logprob"] == [-4.0, -4.333, -4.667, -5.0]  # sequence 2, entries 12 to 15, to four digits
    assert "streams" not in rows(tokens=0)[2]


def test_without_the_learners_streams_tokens_alone_are_shown():
    assert rows(streams={})[0]["streams"] == {"token": ["4"]}


def test_held_out_rollouts_are_shown_by_kind():
    prompts = [make_prompt(name) for name in "ab"]
    greedy = [make_group([make_rollout(p, [1, 2])], {"r": [1]}) for p in prompts]
    sampled = [make_group([make_rollout(p, [3], logprobs=[-2]) for _ in range(2)], {"r": [0, 1]}) for p in prompts]
    found = rollout_rows.held_out("h", ["greedy", "sampled"], greedy + sampled, tokenizer=Words(), rollouts=3, tokens=9)
    seen = [(row["kind"], row["role"], row["prompt"], row["group"], row["reward"]) for row in found]
    assert seen == [
        ("eval/h", "greedy", "a", 0, 1), ("eval/h", "greedy", "b", 1, 1),
        ("eval/h", "sampled", "a", 0, 0), ("eval/h", "sampled", "a", 0, 1), ("eval/h", "sampled", "b", 1, 0),
    ]  # fmt: skip
    assert found[2]["streams"] == {"token": ["3"], "sampler_logprob": [-2.0]}


def test_pieces_of_a_real_tokenizer_join_to_the_text(real_data):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    packed = gzip.decompress((real_data / "tokenizers" / "smollm2" / "tokenizer.json.gz").read_bytes())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(packed.decode()))
    text = "Zwölf  naïve 🙂🙃 emoji,\n\ttabs — and 数学 <|im_end|>"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = rollout_rows.pieces(np.array(tokens), tokenizer)
    assert "".join(found) == text and len(found) == len(tokens)
    assert "" in found  # a character of several tokens counts for the last
    assert found[-1] == "<|im_end|>"
