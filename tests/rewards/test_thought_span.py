"""Thought and output stand where the tags' ids say; a thought without end tag is none."""

import numpy as np
import pytest
from builders import make_prompt, make_rollout

from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.rewards.thought_span import Thought, ThoughtSpan, split

OPEN, CLOSE = [7], [8, 9]


@pytest.mark.parametrize(
    ("tokens", "opened", "expected"),
    [
        ([7, 1, 2, 8, 9, 3], False, Thought(1, 3, 5, True)),
        ([5, 7, 1, 8, 9], False, Thought(2, 3, 5, True)),
        ([7, 8, 9, 3], False, Thought(1, 1, 3, True)),  # an empty thought
        ([7, 1, 8, 9, 7, 2, 8, 9, 3], False, Thought(1, 2, 4, True)),  # the first pair alone counts
        ([8, 9, 7, 1, 8, 9, 3], False, Thought(3, 4, 6, True)),  # an end tag before the opening one is none
        ([7, 1, 8, 2], False, Thought(1, 4, 4, False)),  # half an end tag
        ([1, 2, 8, 9, 3], False, Thought(0, 2, 5, False)),  # never opened: no output
        ([1, 2, 8, 9, 3], True, Thought(0, 2, 4, True)),
        ([7, 2, 8, 9, 3], True, Thought(1, 2, 4, True)),  # opened once more
        ([1, 2], True, Thought(0, 2, 2, False)),
        ([], False, Thought(0, 0, 0, False)),
    ],
)
def test_places_of_a_thought(tokens: list[int], opened: bool, expected: Thought) -> None:
    assert split(np.array(tokens, np.int64), OPEN, CLOSE, opened=opened) == expected


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
