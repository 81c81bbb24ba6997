"""Thought and output stand where the tags' text says, however it is cut into tokens; a thought without end tag is none."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_prompt, make_rollout

from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.rewards.thought_span import Thought, ThoughtSpan, split


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("712893", False, Thought(1, 3, 5, True)),
        ("57189", False, Thought(2, 3, 5, True)),
        ("7893", False, Thought(1, 1, 3, True)),  # an empty thought
        ("718972893", False, Thought(1, 2, 4, True)),  # the first pair alone counts
        ("8971893", False, Thought(3, 4, 6, True)),  # an end tag before the opening one is none
        ("7182", False, Thought(1, 4, 4, False)),  # half an end tag
        ("12893", False, Thought(0, 2, 5, False)),  # never opened: no output
        ("12893", True, Thought(0, 2, 4, True)),
        ("72893", True, Thought(1, 2, 4, True)),  # opened once more
        ("12", True, Thought(0, 2, 2, False)),
        ("", False, Thought(0, 0, 0, False)),
    ],
)
def test_places_of_a_thought(text: str, opened: bool, expected: Thought) -> None:
    assert split(text, "7", "89", opened=opened) == expected


@pytest.mark.parametrize(
    ("text", "thought", "output"),
    [("<think>ab</think>c", "ab", "c"), ("<think>ab", "", ""), ("ab</think>c", "", ""), ("<think></think>a", "", "a")],
)
def test_spans_never_overlap_and_hold_no_tag(text: str, thought: str, output: str) -> None:
    tokenizer = CharTokenizer(alphabet="<>/thinkabc").load()
    rollout = make_rollout(make_prompt(), tokenizer.encode(text))
    spans = ThoughtSpan().mark(rollout, tokenizer)
    assert set(spans) == {"thought", "output"} and not (spans["thought"] & spans["output"]).any()
    assert tokenizer.decode(rollout.tokens[spans["thought"]]) == thought
    assert tokenizer.decode(rollout.tokens[spans["output"]]) == output


def test_a_tag_that_is_empty_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ThoughtSpan\.opening and closing"):
        ThoughtSpan(closing="")


def published(folder: Path, name: str) -> Any:
    """The tokenizer of a public model; that of Qwen2.5 is Qwen3's on plain text, without its added tags of a thought."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = json.loads(gzip.decompress((folder / "tokenizers" / "qwen3" / "tokenizer.json.gz").read_bytes()))
    if name == "qwen2.5":
        made["added_tokens"] = [token for token in made["added_tokens"] if "think" not in token["content"]]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(made)))


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen2.5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", ["\n", ".", ").", " ", "", " \U0001f914"])
def test_a_tag_is_found_whatever_a_published_tokenizer_joins_it_with(real_data: Path, name: str, before: str) -> None:
    tokenizer = published(real_data, name)
    pieces = [f"So it is (B{before}</", "think>", " <answer>B</answer>"]
    # Qwen3's tokenizer itself has the whole tag as one token; a policy may sample it in pieces.
    encoded = pieces if name == "qwen3" else ["".join(pieces)]
    ids = np.concatenate([tokenizer.encode(text, add_special_tokens=False) for text in encoded])
    spans = ThoughtSpan(opened=True).mark(make_rollout(make_prompt(), ids), tokenizer)
    thought, output = (tokenizer.decode(ids[spans[part]]) for part in ("thought", "output"))
    joined = bool(before) and f"{before}</" in (tokenizer.decode([i]) for i in ids)
    assert joined == (before in (".", ").", " "))
    assert thought == "So it is (B" + ("" if joined else before) and output == pieces[2]


def test_a_token_that_holds_the_end_of_a_tag_and_an_answer_is_output() -> None:
    class Joined:
        def decode(self, ids: np.ndarray, **_: object) -> str:
            return "".join(("a", ".</", "think", ">B", "!")[i] for i in ids)

    spans = ThoughtSpan(opened=True).mark(make_rollout(make_prompt(), np.arange(5)), Joined())
    assert spans["thought"].tolist() == [True, False, False, False, False]
    assert spans["output"].tolist() == [False, False, False, True, True]
