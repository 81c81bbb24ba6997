"""Stop strings are found in the decoded text, at the first token that completes them."""

import numpy as np
import pytest

from jaxrl_llm.samplers.requests import stop_length

PIECES = ("a", "b", "ab", "</", "answer", ">", " ", "stop", "st", "op")


def decode(tokens):
    return "".join(PIECES[token] for token in tokens)


def decode_bytes(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def encode(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@pytest.mark.parametrize(
    "tokens, strings, min_tokens, expected",
    [
        ([0, 3, 4, 5, 0], ("</answer>",), 0, 4),  # spans three tokens
        ([0, 8, 9, 0], ("stop",), 0, 3),
        ([0, 7, 0], ("top",), 0, 2),  # within a token
        ([0, 0, 6], ("stop",), 0, None),
        ([2, 0, 7], ("stop", "ab"), 0, 1),  # whichever comes first
        ([7, 0, 0, 7, 0], ("stop",), 1, 1),
        ([7, 0, 0, 7, 0], ("stop",), 2, 4),  # the first one ends too early to count
        ([8, 9, 0], ("stop",), 2, 2),  # ends in the first token that counts
        ([7, 0, 0], ("stop",), 3, None),
        ([7], ("stop",), 5, None),
    ],
)
def test_length_at_the_first_stop_string(tokens, strings, min_tokens, expected):
    assert stop_length(np.array(tokens, np.int32), 0, strings, min_tokens, decode) == expected


def test_searching_piece_by_piece_finds_the_same_token():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(60):
        tokens = rng.integers(0, len(PIECES), 40).astype(np.int32)
        strings, min_tokens, piece = ("> stop", "b</", "opab"), int(rng.integers(0, 30)), int(rng.integers(1, 9))
        whole = next(
            (
                end
                for end in range(max(min_tokens, 1), 41)
                if any(
                    decode(tokens[:end]).find(s, max(0, len(decode(tokens[: end - 1])) - len(s) + 1)) >= 0
                    for s in strings
                )
            ),
            None,
        )
        ends = (stop_length(tokens[: end + piece], end, strings, min_tokens, decode) for end in range(0, 40, piece))
        assert next((end for end in ends if end is not None), None) == whole
        found += whole is not None
    assert 15 < found < 60


def test_a_character_split_over_tokens_is_found_when_it_is_whole():
    tokens = encode("aé!")  # é is two bytes, hence two tokens
    assert stop_length(tokens, 0, ("é",), 0, decode_bytes) == 3
    assert stop_length(tokens, 2, ("é",), 0, decode_bytes) == 3  # its first byte was seen before
    assert stop_length(tokens[:2], 0, ("é",), 0, decode_bytes) is None
