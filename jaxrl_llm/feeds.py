"""What a step learns from: the policy's own samples, or demonstrations and pairs that a dataset gives."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from jaxrl_llm.collect import Collector
from jaxrl_llm.data.pipeline import Encoder, NoRows, PromptStream
from jaxrl_llm.experience import Prompt, Rollout, ScoredGroup
from jaxrl_llm.global_batch import unscored
from jaxrl_llm.hosts import Processes
from jaxrl_llm.preemption import Notice, Stopping
from jaxrl_llm.protocols import Algorithm

Row = TypeVar("Row", Prompt, ScoredGroup)


class SharedStream(PromptStream[Row]):
    """Encoded rows in one global order, of which each process of a run holds a part; all ask for the same batches.

    A batch is the same on any number of processes, which is why the processes exchange what each of them holds of it.

    Args:
      part: this process's rows; those of all processes, one after the other, are the rows.
      processes: those of the run.
      seed: names the order.

    Raises:
      ValueError: no process has a row.
    """

    def __init__(self, part: Sequence[Row], processes: Processes, *, seed: int) -> None:
        self._part: Sequence[Row] = part
        self._processes = processes
        self._starts = np.cumsum([0, *processes.gathered(len(part))]).tolist()
        super().__init__(range(self._starts[-1]), seed=seed)  # type: ignore[arg-type]

    def next_batch(self, n: int) -> list[Row]:
        """The next `n` rows, whole on every process."""
        wanted: list[Any] = super().next_batch(n)
        first, end = self._starts[self._processes.index : self._processes.index + 2]
        held = [[i, self._part[i - first]] for i in wanted if first <= i < end]
        found = {i: row for part in self._processes.gathered(held) for i, row in part}
        return [found[i] for i in wanted]


@runtime_checkable
class Feed(Protocol):
    """Groups for each step, from a place in the data that a checkpoint can hold."""

    async def next(self, step: int) -> list[ScoredGroup]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def take(self) -> dict[str, float]:
        """Counters and times since the last call."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleFeed:
    """Rollouts of the present policy.

    Attributes:
      stream: encoded prompts.
      collector: samples and scores them.
      prompts: prompts of a step.
    """

    stream: PromptStream[Prompt]
    collector: Collector
    prompts: int

    async def next(self, step: int) -> list[ScoredGroup]:
        return await self.collector.batch(self.stream.next_batch, self.prompts, step)

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)

    def take(self) -> dict[str, float]:
        return {**self.collector.take(), "data/epoch": self.stream.epoch}


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenFeed:
    """Responses that the dataset gives: one of a demonstration, two (preferred, rejected) of a pair.

    Attributes:
      stream: the groups, one a row.
      rows: rows of a step.
    """

    stream: PromptStream[ScoredGroup]
    rows: int

    async def next(self, step: int) -> list[ScoredGroup]:
        del step
        return self.stream.next_batch(self.rows)

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)

    def take(self) -> dict[str, float]:
        return {"data/epoch": self.stream.epoch}


@dataclass(frozen=True, kw_only=True, eq=False)
class LedFeed:
    """The groups of process 0, which alone asks a sampler, on every process.

    Attributes:
      feed: that of process 0; None on the others.
      notice: of signals, at which process 0 gives up what it is sampling.
    """

    feed: SampleFeed | Any
    notice: Notice

    async def next(self, step: int) -> list[ScoredGroup]:
        """The groups of a step; raises Stopping on every process where a signal came first."""
        groups: list[ScoredGroup] | None = None
        if self.feed is not None:
            with contextlib.suppress(Stopping):
                groups = await self.notice.unless(self.feed.next(step))
        # The thread leaves the event loop to what is being published and sampled.
        groups = await asyncio.to_thread(self.notice.processes.broadcast, groups)
        if groups is None:
            raise Stopping
        return groups

    def state(self) -> dict[str, Any]:
        return {} if self.feed is None else self.feed.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.feed is not None:
            self.feed.restore(state)

    def take(self) -> dict[str, float]:
        return {} if self.feed is None else self.feed.take()


def given(
    encoder: Encoder, rows: Sequence[Prompt], algorithm: Algorithm, *, row_tokens: int = 0, seed: int = 0
) -> list[ScoredGroup]:
    """The rows as groups of what the algorithm learns from: demonstrations, chunks of documents, pairs and labelled responses.

    Args:
      row_tokens: length of a chunk of documents.
      seed: order of the documents.

    Raises:
      ValueError: a row that is none of these, or no row left.
    """
    if algorithm.learns_from == "documents":
        return documents(encoder, rows, row_tokens, seed)
    if algorithm.learns_from == "demonstrations":
        return demonstrations(encoder, rows)
    alone = algorithm.group_size_at_least == 1
    return pairs(encoder, rows, ends="reward_model" in algorithm.needs, alone=alone)


def demonstrations(encoder: Encoder, rows: Sequence[Prompt]) -> list[ScoredGroup]:
    """Each row's response as the only rollout of its group."""
    return [unscored((rollout,)) for rollout in encoder.demonstrations(rows)]


def documents(encoder: Encoder, rows: Sequence[Prompt], length: int, seed: int | None) -> list[ScoredGroup]:
    """Chunks of `length` predictions of all rows, prompt and response with its end, joined one after the other.

    Their order is named by `seed`; None is that of the rows. A chunk begins with a token that is predicted by none in it, and ends with the first token of the next chunk.

    Raises:
      ValueError: fewer tokens than fill a chunk.
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
            "length (packing.Packing.row_tokens), or give more documents"
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


def pairs(encoder: Encoder, rows: Sequence[Prompt], *, ends: bool = False, alone: bool = False) -> list[ScoredGroup]:
    """The preferred response (`Prompt.response`) and the rejected one (`Prompt.extra["rejected"]`) of each row.

    Args:
      ends: only the end of each response is learned from, by `ended`.
      alone: a row may be a single response with a label instead, True or False in `Prompt.extra["desirable"]`.

    Raises:
      ValueError: a row without a rejected response or with two equal ones, or no pair left.
    """
    found: list[ScoredGroup] = []
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
    """{1: preferred response, -1: rejected response} of a row, or one of the two."""
    if row.response is None:
        raise ValueError(f"row {row.id!r} has no response: preferences need Prompt.response")
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
    """The rollout with one more token, the only one in its mask.

    A packed row holds all tokens of a sequence but the last, so what a model says after the last token of a response
    stands where this further token would be predicted; which token it is does not matter.
    """
    last = lambda x, value: np.append(x, x.dtype.type(value))  # noqa: E731
    return replace(
        rollout, tokens=last(rollout.tokens, rollout.tokens[-1]), sampler_logprobs=last(rollout.sampler_logprobs, 0),
        mask=last(np.zeros_like(rollout.mask), True), versions=last(rollout.versions, -1),
    )  # fmt: skip


def stats_of(groups: Sequence[ScoredGroup], streams: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Per-rollout means over policy tokens of the learner's streams [S, T], {name: [G]} by group."""
    out, start = [], 0
    for group in groups:
        rows = range(start, start + len(group.rollouts))
        start += len(group.rollouts)
        stats = {}
        for name, stream in streams.items():
            means = [
                stream[i, : len(r.mask)][r.mask].mean() if r.mask.any() else 0.0
                for i, r in zip(rows, group.rollouts, strict=True)
            ]
            stats[name] = np.asarray(means, np.float64)
        out.append(stats)
    return out
