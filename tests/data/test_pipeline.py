"""The stream's order is one order after any resume; the encoder counts what it drops."""

import json
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from jaxrl_llm.data.pipeline import Encoder, PromptStream
from jaxrl_llm.data.tokenizer import ByteTokenizer, CharTokenizer
from jaxrl_llm.experience import Prompt


def ids(rows: Sequence[Prompt]) -> list[str]:
    return [row.id for row in rows]


def stream(count: int = 10, seed: int = 0) -> PromptStream[Prompt]:
    return PromptStream([Prompt(id=str(i), text=chr(97 + i)) for i in range(count)], seed=seed)


def test_the_tokenizers_special_tokens_are_read_once_for_all_rows():
    """transformers looks them up in its vocabulary at each reading."""

    class Counted(Characters):
        read = 0

        @property
        def eos_token_id(self) -> int:
            Counted.read += 1
            return 0

    rows = [Prompt(id=str(n), text="ab", response="a") for n in range(5)]
    found = Encoder(tokenizer=Counted(), max_prompt_tokens=8).demonstrations(rows)
    assert [rollout.tokens[-1] for rollout in found] == [0] * 5 and Counted.read == 1


def test_every_epoch_is_its_own_permutation_of_the_rows() -> None:
    rows = ids(stream(10, seed=3).next_batch(30))
    epochs = [rows[:10], rows[10:20], rows[20:]]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seeds_share_no_epoch() -> None:
    of = {seed: ids(stream(12, seed=seed).next_batch(60)) for seed in range(4)}
    epochs = [tuple(rows[i : i + 12]) for rows in of.values() for i in range(0, 60, 12)]
    assert len(set(epochs)) == 20
    assert of[0] == ids(stream(12, seed=0).next_batch(60))


def test_a_resume_at_every_row_gives_the_same_rest() -> None:
    whole = ids(stream(7, seed=5).next_batch(21))
    for row in range(21):
        first = stream(7, seed=5)
        if row:
            first.next_batch(row)
        again = stream(7, seed=5)
        again.restore(json.loads(json.dumps(first.state())))
        assert whole[row:] == (ids(again.next_batch(21 - row)) if row < 21 else [])


def test_other_data_than_the_checkpoint_read_is_an_error() -> None:
    state = stream(10, seed=1).state()
    with pytest.raises(ValueError, match=r"rows 10 -> 9"):
        stream(9, seed=1).restore(state)
    with pytest.raises(ValueError, match=r"seed 1 -> 2.*start a new run"):
        stream(10, seed=2).restore(state)


def test_a_stream_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got no rows"):
        PromptStream([])


class Characters:
    """One id a character: 1 is the start and 2 the end of a sequence."""

    bos_token, eos_token_id, name_or_path = "^", 2, "characters"

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        codes = [1 if c == "^" else ord(c) for c in text]
        return {"input_ids": ([1] if add_special_tokens else []) + codes}


def encoder(limit: int = 4, **options: object) -> Encoder:
    return Encoder(tokenizer=Characters(), max_prompt_tokens=limit, **options)  # type: ignore[arg-type]


def text(of: str, response: str | None = None) -> Prompt:
    return Prompt(id=of, text=of, response=response)


ROWS = [text("abc"), text("abcd"), text("  "), text("ab")]


def test_long_and_empty_prompts_are_dropped_and_counted() -> None:
    encode = encoder(4)
    kept = encode.prompts(ROWS)
    assert [list(row.tokens) for row in kept] == [[1, 97, 98, 99], [1, 97, 98]]  # type: ignore[arg-type]
    assert kept[0].tokens is not None and kept[0].tokens.dtype == np.int32
    counts = encode.counts()
    assert {name: n for name, n in counts.items() if n} == {
        "rows": 4,
        "kept": 2,
        "dropped/too_long": 1,
        "dropped/empty": 1,
    }
    assert counts["truncated"] == 0


def test_truncation_on_the_left_keeps_the_end() -> None:
    encode = encoder(3, truncation="left")
    assert [list(row.tokens) for row in encode.prompts(ROWS[:1])] == [[97, 98, 99]]  # type: ignore[arg-type]
    assert encode.counts()["truncated"] == 1


def test_truncation_as_an_error_names_the_prompt_and_the_binding() -> None:
    with pytest.raises(ValueError, match=r"prompt of 'abcd' has 5 tokens and PROMPT_LIMIT is 4"):
        encoder(4, truncation="error").prompts(ROWS)
    with pytest.raises(ValueError, match=r"response of 'a' has 3 tokens and RESPONSE_LIMIT is 2"):
        encoder(4, truncation="error", max_response_tokens=2).demonstrations([text("a", "xy")])


def test_nothing_left_is_an_error_with_the_counts() -> None:
    with pytest.raises(ValueError, match=r"none of 2 rows is left.*'dropped/too_long': 2"):
        encoder(1).prompts([text("abc"), text("bcd")])


def test_a_demonstration_is_the_response_and_the_end_id() -> None:
    encode = encoder(8, max_response_tokens=3)
    rows = encode.demonstrations([text("ab", "xy"), text("ab", "xyz"), text("ab"), text("", "x")])
    assert len(rows) == 1
    assert np.array_equal(rows[0].prompt.tokens, [1, 97, 98])  # type: ignore[arg-type]
    assert list(rows[0].tokens) == [120, 121, 2]
    assert rows[0].mask.all() and rows[0].finish == "stop" and set(rows[0].versions) == {-1}
    counts = encode.counts()
    assert [counts[f"dropped/{why}"] for why in ("long_response", "no_response", "empty")] == [1, 1, 1]
    assert counts["rows"] == 4 and counts["kept"] == 1


def test_a_cut_demonstration_does_not_claim_to_end() -> None:
    row = encoder(8, truncation="left", max_response_tokens=2).demonstration(text("ab", "xyz"))
    assert row is not None and list(row.tokens) == [120, 121] and row.finish == "length"


def test_a_start_token_written_by_the_template_is_not_doubled() -> None:
    row = encoder(8).prompt(text("^ab"))
    assert row is not None and list(row.tokens) == [1, 97, 98]  # type: ignore[arg-type]


def test_messages_without_a_chat_template_name_the_way_out() -> None:
    messages = Prompt(id="m", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match=r"'characters' has no chat template: set the data source's `template`"):
        encoder().prompt(messages)


def test_tokens_given_by_the_source_are_kept() -> None:
    row = encoder().prompt(Prompt(id="t", tokens=np.array([5, 6], np.int32)))
    assert row is not None and list(row.tokens) == [5, 6]  # type: ignore[arg-type]


def test_bad_options_of_the_encoder_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"max_prompt_tokens must be >= 1 \(got 0\)"):
        encoder(0)
    with pytest.raises(Exception, match=r"truncation"):
        encoder(truncation="right")


def test_data_and_rewards_import_no_jax() -> None:
    code = """
import importlib, pathlib, sys
import jaxrl_llm
root = pathlib.Path(jaxrl_llm.__file__).parent
for folder in ("data", "rewards"):
    for file in sorted((root / folder).glob("*.py")):
        importlib.import_module(f"jaxrl_llm.{folder}.{file.stem}")
        assert "jax" not in sys.modules, file
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_texts_of_many_rows_are_encoded_together_to_the_ids_of_each() -> None:
    class Counted:
        """A tokenizer whose calls are counted."""

        def __init__(self, tokenizer: object) -> None:
            self.calls, self._tokenizer = 0, tokenizer

        def __getattr__(self, name: str) -> object:
            return getattr(self._tokenizer, name)

        def __call__(self, *arguments: object, **options: object) -> object:
            self.calls += 1
            return self._tokenizer(*arguments, **options)

    tokenizer = ByteTokenizer(add_bos=True).load()
    rows = [Prompt(id=str(i), text=f"{'<bos>' * (i % 2)}asked {i} \u00e9", response=f"said {i % 7}") for i in range(50)]
    counted = Counted(tokenizer)
    found = Encoder(tokenizer=counted, max_prompt_tokens=64).demonstrations(rows)
    assert counted.calls == 2  # with the tokenizer's own special tokens, and without
    for row, rollout in zip(rows, found, strict=True):
        special = [] if row.text.startswith("<bos>") else [1]
        text = row.text.removeprefix("<bos>").encode()
        own = [1] if row.text.startswith("<bos>") else []
        assert rollout.prompt.tokens.tolist() == [*special, *own, *_byte_ids(tokenizer, text)]
        assert rollout.tokens.tolist() == [*_byte_ids(tokenizer, row.response.encode()), 2]


def _byte_ids(tokenizer: object, text: bytes) -> list[int]:
    """Ids of bytes by the vocabulary's own table of printable stand-ins, one lookup a byte."""
    stand_ins = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[c] for word, _ in stand_ins(text.decode()) for c in word]


def test_a_text_that_cannot_be_encoded_is_told_with_its_row_among_others_that_can() -> None:
    rows = [Prompt(id=str(i), text="ab" if i != 3 else "a?") for i in range(5)]
    with pytest.raises(ValueError, match=r"prompt '3': .*no token for '\?'"):
        Encoder(tokenizer=CharTokenizer(alphabet="ab").load(), max_prompt_tokens=8).prompts(rows)
