"""The checks of components' fields that read the fields' types."""

from dataclasses import dataclass
from typing import Literal

import pytest

from jaxrl_llm import components

Side = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    side: Side = "left"
    sign: Literal[1, -1] = 1
    note: str = ""

    def __post_init__(self) -> None:
        components.choices(self)


@dataclass(frozen=True, kw_only=True)
class Trimmed(Cut):
    how: Literal["words", "tokens"] = "words"


@pytest.mark.parametrize(
    ("settings", "binding"),
    [
        ({"side": "up"}, r"Trimmed\.side must be one of \('left', 'right'\) \(got 'up'\)"),
        ({"sign": 0}, r"Trimmed\.sign must be one of \(1, -1\) \(got 0\)"),
        ({"how": "letters"}, r"Trimmed\.how must be one of \('words', 'tokens'\) \(got 'letters'\)"),
    ],
)
def test_a_value_that_its_literal_type_lacks_is_refused(settings, binding):
    with pytest.raises(ValueError, match=binding):
        Trimmed(**settings)


def test_values_of_the_literal_types_are_taken():
    assert Trimmed(side="right", sign=-1, how="tokens", note="any").sign == -1
