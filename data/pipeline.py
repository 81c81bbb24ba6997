"""Data pipeline: encodes a dataset's rows as token prefixes and serves them in an order that resumes at the exact row."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data.tokenizer import ids
from jaxrl_llm.experience import Group, Prompt, Rollout

Row = TypeVar("Row")

COUNTS = (
    "rows",
    "kept",
    "truncated",
    "dropped/too_long",
    "dropped/empty",
    "dropped/long_response",
    "dropped/no_response",
)


class NoRows(ValueError):
    """Raised where no row is left after encoding."""


class PromptStream(Generic[Row]):
    """An endless stream of rows; every epoch has its own order.

    Args:
      rows: prompts, or rows that were encoded already.
      seed: seed of the order; two seeds share no epoch.

    Raises:
      ValueError: there are no rows.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int = 0) -> None:
        if not rows:
            raise ValueError("PromptStream got no rows: a run needs at least one prompt")
        self.rows, self.seed, self.position = rows, seed, 0
        self._order = _order(len(rows), seed)

    @property
    def epoch(self) -> float:
        """Number of passes over the rows so far."""
        return self.position / len(self.rows)

    def next_batch(self, n: int) -> list[Row]:
        """Returns the next `n` rows."""
        return self.numbered([self.next_number() for _ in range(n)])

    def next_number(self) -> int:
        """Returns the number of the next row, which counts as read."""
        number = self._order(self.position)
        self.position += 1
        return number

    def numbered(self, numbers: Sequence[int]) -> list[Row]:
        """Returns the rows of these numbers."""
        return [self.rows[i] for i in numbers]

    def learn(self, groups: Sequence[Group]) -> None:
        """Receives the groups of its prompts with their rewards, which this stream ignores: it draws all prompts alike."""

    def take(self) -> dict[str, float]:
        """Returns metrics of the stream since the last call."""
        return {"data/epoch": self.epoch}

    def state(self) -> dict[str, Any]:
        """Returns a JSON-like state: the number of rows read, and what identifies their order."""
        return {"position": self.position, "rows": len(self.rows), "seed": self.seed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`.

        Raises:
          ValueError: the rows or their order are not those of `state`, or it is of a stage that samples ahead.
        """
        if "coming" in state:
            raise ValueError(
                "the checkpoint holds batches that were sampled ahead: set MAX_STALENESS as it was, or start a new run folder"
            )
        here = self.state()
        changed = [
            f"{name} {state.get(name)} -> {here[name]}"
            for name in here
            if name != "position" and state.get(name) != here[name]
        ]
        if changed:
            raise ValueError(
                f"the data is not the one the checkpoint read ({'; '.join(changed)}): restore the data bindings and "
                "the seed of that run, or start a new run folder"
            )
        self.position = int(state["position"])


def _order(rows: int, seed: int) -> Callable[[int], int]:
    """Returns a function from position in the global order to row; each epoch is a new permutation."""
    import grain  # grain imports jax, and host-only users of this module do not need it

    # grain adds the epoch to the seed; with the plain seed, seed 0's second epoch would equal seed 1's first.
    spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
    order = grain.MapDataset.range(rows).shuffle(seed=spread).repeat()
    return lambda g: int(order[g])


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes prompts and demonstrations as tokens, and counts the rows that it truncates or drops.

    Attributes:
      tokenizer: a transformers tokenizer.
      max_prompt_tokens: largest number of tokens of a prompt.
      max_response_tokens: largest number of tokens of a demonstration's response, including its end-of-sequence id; None for no limit.
      truncation: treatment of a longer prompt: "drop" leaves it out, "left" cuts its beginning, "error" raises; a longer
        response is left out, loses its end, or raises.
      template_kwargs: keyword arguments of the tokenizer's chat template, such as enable_thinking.
    """

    tokenizer: Any
    max_prompt_tokens: int
    max_response_tokens: int | None = None
    truncation: Literal["drop", "left", "error"] = "drop"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)
    _ahead: dict[tuple[str, bool], list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        components.choices(self)
        components.at_least(self, 1, "max_prompt_tokens", "max_response_tokens")

    @cached_property
    def _start(self) -> str | None:  # transformers looks its special tokens up at each reading
        return self.tokenizer.bos_token

    @cached_property
    def _end(self) -> int | None:
        return self.tokenizer.eos_token_id

    def counts(self) -> dict[str, int]:
        """Returns the numbers of rows seen, kept and truncated so far, and of rows dropped by reason."""
        return {name: self._counts[name] for name in COUNTS}

    def prompts(self, rows: Sequence[Prompt]) -> list[Prompt]:
        """Encodes all rows and returns those that fit.

        Raises:
          ValueError: a row cannot be encoded, or no row is left.
        """
        return self._all(self.prompt, rows)

    def demonstrations(self, rows: Sequence[Prompt]) -> list[Rollout]:
        """Returns all rows that fit, as rollouts whose tokens are the response and the end-of-sequence id.

        Raises:
          ValueError: a row cannot be encoded, or no row is left.
        """
        return self._all(self.demonstration, rows)

    def prompt(self, prompt: Prompt) -> Prompt | None:
        """Returns the prompt with its tokens, or None where it was dropped."""
        self._counts["rows"] += 1
        encoded = self._prompt(prompt)
        self._counts["kept"] += encoded is not None
        return encoded

    def demonstration(self, prompt: Prompt) -> Rollout | None:
        """Returns the response as a rollout of the encoded prompt, or None where it was dropped."""
        self._counts["rows"] += 1
        if prompt.response is None:
            self._counts["dropped/no_response"] += 1
            return None
        encoded = self._prompt(prompt)
        response = None if encoded is None else self._response(prompt)
        if encoded is None or response is None:
            return None
        tokens, mask = response
        self._counts["kept"] += 1
        whole = tokens[-1] == self._end
        return Rollout(
            prompt=encoded,
            tokens=tokens,
            sampler_logprobs=np.zeros(len(tokens), np.float32),
            mask=mask,
            versions=np.full(len(tokens), -1, np.int32),
            finish="stop" if whole else "length",
            text=prompt.response,
        )

    def _all(self, encode: Callable[[Prompt], Any], rows: Sequence[Prompt]) -> list[Any]:
        self._read_ahead(rows)
        encoded = [row for row in map(encode, rows) if row is not None]
        self._ahead.clear()
        if not encoded and self._counts["dropped/no_response"] == self._counts["rows"]:
            raise NoRows(
                f"none of {len(rows)} rows has a response to learn from: demonstrations have a column `completion`, or `messages` that end with "
                "the assistant's (rows.Rows.response names another column)"
            )
        if not encoded:
            raise NoRows(
                f"none of {len(rows)} rows is left after encoding ({self.counts()}): raise PROMPT_LIMIT "
                f"(max_prompt_tokens, now {self.max_prompt_tokens}) or RESPONSE_LIMIT (max_tokens, now "
                f"{self.max_response_tokens}), or check the data"
            )
        return encoded

    def _read_ahead(self, rows: Sequence[Prompt]) -> None:
        """Encodes the rows' texts together, which takes a tenth of the time; a text that fails is encoded again with its row, which raises."""
        if not getattr(self.tokenizer, "is_fast", False):
            return
        asked = [self._text(row) for row in rows if row.tokens is None and row.messages is None]
        said = [(row.response, False) for row in rows if row.response is not None and "turns" not in row.extra]
        for special in (True, False):
            texts = sorted({text for text, own in (*asked, *said) if own is special})
            with contextlib.suppress(Exception):  # the tokenizers library raises bare Exception
                found = self.tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
                self._ahead.update({(text, special): ids for text, ids in zip(texts, found)})

    def _prompt(self, prompt: Prompt) -> Prompt | None:
        tokens = self._ids(prompt.id, *self._text(prompt)) if prompt.tokens is None else prompt.tokens
        text = prompt.text if prompt.messages is None else "".join(message["content"] for message in prompt.messages)
        if not len(tokens) or (text is not None and not text.strip()):
            self._counts["dropped/empty"] += 1
            return None
        if len(tokens) > self.max_prompt_tokens:
            if not self._fits_by_policy(prompt.id, "prompt", len(tokens), self.max_prompt_tokens, "dropped/too_long"):
                return None
            tokens = tokens[-self.max_prompt_tokens :]
        return replace(prompt, tokens=tokens)

    def _response(self, prompt: Prompt) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the response's token ids, int32 [T], and bool [T], True for those that the policy would have chosen.

        `Prompt.extra["turns"]`, pairs of speaker and text, marks what an environment said; each turn is encoded separately,
        as when the policy interacts with the environment. `Prompt.extra["response_tokens"]` is used unchanged.
        """
        if (given := prompt.extra.get("response_tokens")) is not None:
            return self._limited(prompt, np.asarray(given, np.int32), np.ones(len(given), bool))
        end = self._end
        if end is None:
            raise ValueError(
                "the tokenizer has no end-of-sequence token: set its eos_token, demonstrations end with it"
            )
        turns = prompt.extra.get("turns") or [("policy", prompt.response or "")]
        said = [(speaker == "policy", self._ids(prompt.id, text, False)) for speaker, text in turns]
        tokens = np.concatenate([*(ids for _, ids in said), [end]]).astype(np.int32)
        mask = np.concatenate([*(np.full(len(ids), policy) for policy, ids in said), [True]])
        return self._limited(prompt, tokens, mask)

    def _limited(self, prompt: Prompt, tokens: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns a response within `max_response_tokens`, or None where it was dropped."""
        limit = self.max_response_tokens
        if limit is None or len(tokens) <= limit:
            return tokens, mask
        keep = self._fits_by_policy(prompt.id, "response", len(tokens), limit, "dropped/long_response")
        return (tokens[:limit], mask[:limit]) if keep else None

    def _fits_by_policy(self, name: str, what: str, length: int, limit: int, reason: str) -> bool:
        """Applies `truncation` to an overlong text: returns False to drop it and True to cut it."""
        if self.truncation == "error":
            raise ValueError(
                f"the {what} of {name!r} has {length} tokens and {what.upper()}_LIMIT is {limit}: raise it, or set "
                "`truncation` of train.Stage or harness.Harness to 'drop' or 'left'"
            )
        self._counts["truncated" if self.truncation == "left" else reason] += 1
        return self.truncation == "left"

    def _text(self, prompt: Prompt) -> tuple[str, bool]:
        """Returns the text to tokenise, and whether the tokenizer adds its special tokens."""
        if prompt.messages is None:
            text = prompt.text or ""
            return text, not (
                self._start and text.startswith(self._start)
            )  # the template's own start token must not be doubled
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"prompt {prompt.id!r} has chat messages and the tokenizer {self.tokenizer.name_or_path!r} has no chat "
                "template: set the data source's `template` to a text template of data/templates.py (r1_zero, alpaca, "
                "base, question_only ...), or give the tokenizer a chat template"
            )
        tools = [dict(tool) for tool in prompt.extra.get("tools") or ()]
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages],
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=True,
            **self.template_kwargs,
        )
        return text, False

    def _ids(self, name: str, text: str, special: bool) -> np.ndarray:
        if (known := self._ahead.get((text, special))) is not None:
            return np.asarray(known, np.int32)
        try:
            return ids(self.tokenizer, text, special=special)
        except ValueError as error:
            raise ValueError(f"prompt {name!r}: {error}") from error
