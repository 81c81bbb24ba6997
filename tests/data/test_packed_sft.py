"""Packed rows hold the documents' stream, every token of it once as a label."""

from itertools import pairwise

import numpy as np
import pytest

from jaxrl_llm.data.packed_sft import PackedSFT
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.data.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer(alphabet="abcdefghijs:=", add_bos=True)


def test_rows_follow_each_other_and_nothing_is_lost() -> None:
    source, tokenizer = Sorting(size=20, alphabet="abcdefghij"), TOKENIZER.load()
    rows = PackedSFT(source=source, tokenizer=TOKENIZER, seq_length=16, shuffle=False).rows()
    rollouts = Encoder(tokenizer=tokenizer, max_prompt_tokens=1, max_response_tokens=16).demonstrations(rows)
    tokens = [int(rollouts[0].prompt.prefix[0]), *(int(t) for r in rollouts for t in r.tokens)]
    whole = [t for r in source.rows() for t in (1, *tokenizer.encode(r.text + r.response, add_special_tokens=False), 2)]
    assert tokens == whole[: len(tokens)] and len(whole) - len(tokens) < 16
    assert all(r.mask.all() and len(r.tokens) == 16 for r in rollouts)
    assert all(a.tokens[-1] == b.prompt.prefix[0] for a, b in pairwise(rollouts))


def test_the_seed_shuffles_documents() -> None:
    source = Sorting(size=20)
    first, second = (
        PackedSFT(source=source, tokenizer=CharTokenizer(alphabet="abcdefghijs:="), seq_length=8, seed=s).rows() for s in (0, 1)
    )  # fmt: skip
    both = [np.concatenate([r.extra["response_tokens"] for r in rows]) for rows in (first, second)]
    assert not np.array_equal(*both) and len(both[0]) == len(both[1])


def test_too_little_text_and_chat_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="too few for a row of 999"):
        PackedSFT(source=Sorting(size=2), tokenizer=TOKENIZER, seq_length=999).rows()
