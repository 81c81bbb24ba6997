"""Groups of responses that a dataset holds: demonstrations, chunks of documents, pairs and labelled responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_llm.data.pipeline import Encoder, NoRows, PromptStream
from jaxrl_llm.experience import Group, Prompt, Rollout, unscored
from jaxrl_llm.protocols import Algorithm


@dataclass(frozen=True, kw_only=True, eq=False)
class OfflineGroups:
    """A group loader of the dataset's own responses: one for a demonstration, two (preferred, rejected) for a pair.

    Attributes:
      stream: the groups, one per row.
      rows: number of rows of a step.
    """

    stream: PromptStream[Group]
    rows: int

    async def next(self, step: int) -> list[Group]:
        del step
        return self.stream.next_batch(self.rows)

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)

    def take(self) -> dict[str, float]:
        return self.stream.take()


def given(
    encoder: Encoder, rows: Sequence[Prompt], algorithm: Algorithm, *, row_tokens: int = 0, seed: int = 0
) -> list[Group]:
    """Turns rows into groups of what the algorithm learns from: demonstrations, chunks of documents, pairs or labelled responses.

    A chunk of documents has `row_tokens` predictions, and `seed` gives the documents' order.

    Raises:
      ValueError: a row is none of these, or no row is left.
    """
    if algorithm.learns_from == "documents":
        return documents(encoder, rows, row_tokens, seed)
    if algorithm.learns_from == "demonstrations":
        return demonstrations(encoder, rows)
    alone = algorithm.group_size_at_least == 1
    return pairs(encoder, rows, ends="reward_model" in algorithm.needs, alone=alone)


def demonstrations(encoder: Encoder, rows: Sequence[Prompt]) -> list[Group]:
    """Makes each row's response the only rollout of its group."""
    return [unscored((rollout,)) for rollout in encoder.demonstrations(rows)]


def documents(encoder: Encoder, rows: Sequence[Prompt], length: int, seed: int | None) -> list[Group]:
    """Joins all rows (prompt, response and its end) one after the other, and cuts them into chunks of `length` predictions.

    `seed` gives the order of the rows; None keeps it. The first token of a chunk is not predicted in it, and its last token is the
    first of the next chunk.

    Raises:
      ValueError: there are fewer tokens than one chunk needs.
    """
    whole = replace(encoder, max_prompt_tokens=np.iinfo(np.int32).max, max_response_tokens=None)
    found = whole.demonstrations(rows)
    order = np.arange(len(found)) if seed is None else np.random.default_rng(seed).permutation(len(found))
    texts = [np.concatenate([found[i].prompt.prefix, found[i].tokens]) for i in order]
    tokens = np.concatenate(texts).astype(np.int32)
    sources = np.repeat(order, [len(t) for t in texts])
    starts = range(0, len(tokens) - length, length)
    if not starts:
        raise ValueError(
            f"the {len(found)} documents have {len(tokens)} tokens and a chunk of {length} needs {length + 1}: lower its "
            "length (train.Packing.row_tokens), or give more documents"
        )
    return [
        unscored((_chunk(tokens[i : i + length + 1], f"chunk/{i}", found[sources[i]].prompt.source),)) for i in starts
    ]


def _chunk(tokens: np.ndarray, name: str, source: str) -> Rollout:
    said = tokens[1:]
    return Rollout(
        prompt=Prompt(id=name, tokens=tokens[:1], source=source), tokens=said, sampler_logprobs=np.zeros(len(said), np.float32),
        mask=np.ones(len(said), bool), versions=np.full(len(said), -1, np.int32), finish="length",
    )  # fmt: skip


def pairs(encoder: Encoder, rows: Sequence[Prompt], *, ends: bool = False, alone: bool = False) -> list[Group]:
    """Makes a group of the preferred response (`Prompt.response`) and the rejected one (`Prompt.extra["rejected"]`) of each row.

    Args:
      ends: whether only the end of each response is learned from, by `ended`.
      alone: whether a row may be a single response with a label instead, True or False in `Prompt.extra["desirable"]`.

    Raises:
      ValueError: a row has no rejected response or two equal ones, or no pair is left.
    """
    found: list[Group] = []
    for row in rows:
        sides = _sides(row, alone)
        rollouts = [encoder.demonstration(replace(row, response=text)) for text in sides.values()]
        kept = [ended(r) if ends else r for r in rollouts if r is not None]
        if len(kept) == len(sides):
            found.append(unscored(kept, list(sides)))
    if not found:
        raise NoRows(f"none of {len(rows)} pairs is left after encoding ({encoder.counts()}): raise the token limits")
    return found


def _sides(row: Prompt, alone: bool) -> dict[int, str]:
    """Returns {1: preferred response, -1: rejected response} of a row, or one of the two."""
    if row.response is None:
        raise ValueError(
            f"row {row.id!r} has no response: preferences need Prompt.response, such as rows with the columns prompt, chosen and rejected"
        )
    if "rejected" in row.extra:
        rejected = str(row.extra["rejected"])
        if rejected == row.response:
            raise ValueError(
                f"row {row.id!r} prefers a response to itself: both sides are {rejected[:80]!r}; leave the row out of DATA"
            )
        return {1: row.response, -1: rejected}
    if alone and isinstance(row.extra.get("desirable"), bool):
        return {1 if row.extra["desirable"] else -1: row.response}
    label = ", or a label True or False in Prompt.extra['desirable']" if alone else ""
    raise ValueError(
        f"row {row.id!r} has no rejected response: pairs need Prompt.response and Prompt.extra['rejected']{label}"
    )


def ended(rollout: Rollout) -> Rollout:
    """Returns the rollout with one more token, the only one in its mask.

    A packed row holds all tokens of a sequence but the last, so the output of a model after the last token of a
    response stands where this further token would be predicted; which token it is does not matter.
    """
    last = lambda x, value: np.append(x, x.dtype.type(value))  # noqa: E731
    return replace(
        rollout, tokens=last(rollout.tokens, rollout.tokens[-1]), sampler_logprobs=last(rollout.sampler_logprobs, 0),
        mask=last(np.zeros_like(rollout.mask), True), versions=last(rollout.versions, -1),
    )  # fmt: skip
