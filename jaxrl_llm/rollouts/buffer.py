"""The rollout buffer: groups are sampled ahead of the step that learns from them, while earlier steps still train.

With max_staleness k, step s learns under policy version s - 1, and the batches of steps s + 1 to s + k are sampled meanwhile. Rollouts
whose staleness at their own step is above k are dropped and counted. The buffer is part of a checkpoint: complete batches are
restored as they were, and incomplete ones are sampled again from the same prompts.
"""

import asyncio
import base64
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.distributed.serialization import Deferred
from jaxrl_llm.experience import Group, Prompt, Rollout, Scores
from jaxrl_llm.rollouts.collect import Collector
from jaxrl_llm.rollouts.curriculum import CurriculumStream

# Of the buffer in checkpoints. Formats up to 3 count the batches begun, which the steps say; format 2 has no branches, and format 1, which has no
# number, holds arrays as base64 text.
FORMAT = 4
_PLAYED = ("branches", "turns", "valid", "error", "rewards", "info")  # what an environment or an agent adds
_ARRAYS = {"tokens": np.int32, "sampler_logprobs": np.float32, "mask": np.bool_, "versions": np.int32}


@dataclass(kw_only=True, eq=False)
class PendingBatch:
    """A batch that a later step learns from.

    Attributes:
      step: the step that learns from it.
      draws: positions in the data stream that its prompts were drawn from.
      again: positions that a resumed batch draws from first.
      task: the task that samples and scores it.
    """

    step: int
    draws: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    task: asyncio.Future[list[Group]] | None = None


@dataclass(kw_only=True, eq=False)
class RolloutBuffer:
    """A group loader of rollouts by the current policy and by up to `max_staleness` versions before it.

    Attributes:
      stream: encoded prompts.
      collector: samples and scores the groups.
      prompts: number of prompts of a step.
      max_staleness: batches that are sampled ahead, and versions that a token may be behind.
      last: the last step of the stage, for which a batch is sampled.
      least: fewest rollouts of a group that are worth learning from.
    """

    stream: PromptStream[Prompt] | CurriculumStream
    collector: Collector
    prompts: int
    max_staleness: int
    last: int
    least: int = 1

    def __post_init__(self) -> None:
        self._pending: list[PendingBatch] = []
        self._counters: Counter[str] = Counter()
        self._waited_s = 0.0

    async def next(self, step: int) -> list[Group]:
        """Returns the batch of `step`; the batches of the next steps are being sampled when it returns."""
        begin = time.perf_counter()
        first = step - (self._pending[0].step if self._pending else step)
        if first:
            raise RuntimeError(f"step {step} was asked for where the buffer begins with step {step - first}")
        while len(self._pending) <= self.max_staleness and step + len(self._pending) <= self.last:
            self._pending.append(PendingBatch(step=step + len(self._pending)))
        for pending in self._pending:
            if pending.task is None:
                pending.task = asyncio.ensure_future(self._batch(pending))
                pending.task.add_done_callback(_seen)
        task = self._pending[0].task
        assert task is not None
        groups = await task
        self._pending.pop(0)
        self._waited_s += time.perf_counter() - begin
        return self._fresh(groups, step - 1 - self.max_staleness)

    async def _batch(self, pending: PendingBatch) -> list[Group]:
        return await self.collector.batch(
            lambda n: self._draw(pending, n), self.prompts, pending.step, self.stream.learn
        )

    def _draw(self, pending: PendingBatch, n: int) -> list[Prompt]:
        """Returns the next `n` prompts of the stream, or those that the batch drew before the run was resumed."""
        here = self.stream.position
        place = pending.again.pop(0) if pending.again else here
        pending.draws.append(place)
        self.stream.position = place
        drawn = self.stream.next_batch(n)
        if place != here:
            self.stream.position = here
        return drawn

    def _fresh(self, groups: Sequence[Group], oldest: int) -> list[Group]:
        """Drops rollouts that hold a token of a version before `oldest`, and groups that keep fewer than `least` rollouts."""
        kept = []
        for group in groups:
            stays = [
                i for i, r in enumerate(group.rollouts) if not any(np.any(b.versions[b.mask] < oldest) for b in r.paths)
            ]
            self._counters["stale"] += len(group.rollouts) - len(stays)
            if len(stays) == len(group.rollouts):
                kept.append(group)
            elif len(stays) >= self.least:
                kept.append(_part(group, stays))
            else:
                self._counters["stale_rest"] += len(stays)
        if groups and not kept:
            raise RuntimeError(
                f"every rollout of a step was older than version {oldest}: a server lags behind, or set Stage.max_staleness higher"
            )
        return kept

    def state(self) -> dict[str, Any]:
        """Returns the stream's position and the pending batches, JSON-like but for the groups of complete batches, which are deferred."""
        pending = [{"step": c.step, "draws": c.draws + c.again, "groups": _kept(c)} for c in self._pending]
        return {"format": FORMAT, "stream": self.stream.state(), "coming": pending}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`, whose deferred parts have been loaded; from that of a run without a buffer, with nothing sampled ahead.

        Raises:
          ValueError: the data differs, or the state is of a format that is not known.
        """
        if "coming" not in state:
            self.stream.restore(state)
            return
        if (number := state.get("format", 1)) not in range(1, FORMAT + 1):
            raise ValueError(
                f"the checkpoint holds groups sampled ahead in format {number}, and this version reads the formats 1 to {FORMAT}: go on "
                "with the version that wrote it, or start a new run folder"
            )
        self.stream.restore(state["stream"])
        rows = {(prompt.source, prompt.id): prompt for prompt in self.stream.rows}
        self._pending = []
        for entry in state["coming"]:
            pending = PendingBatch(step=entry["step"])
            if entry["groups"] is None:
                pending.again = list(entry["draws"])
            else:
                pending.draws = list(entry["draws"])
                pending.task = asyncio.get_running_loop().create_future()
                pending.task.set_result([restored(group, rows) for group in entry["groups"]])
            self._pending.append(pending)

    def take(self) -> dict[str, float]:
        """Returns counters and times since the last call; the sampling time is the time that steps waited for their batches."""
        counts = {f"count/{name}": float(count) for name, count in self._counters.items()}
        taken = self.collector.take() | {"time/sample_s": self._waited_s}
        self._counters.clear()
        self._waited_s = 0.0
        ready = sum(_whole(pending) is not None for pending in self._pending)
        return {**taken, **counts, **self.stream.take(), "buffer/whole": float(ready)}


def _whole(pending: PendingBatch) -> list[Group] | None:
    """Returns the groups of a complete batch; None for others."""
    task = pending.task
    done = task is not None and task.done() and not task.cancelled() and task.exception() is None
    return task.result() if task is not None and done else None


def _kept(pending: PendingBatch) -> Deferred | None:
    """Returns the groups of a complete batch, held by reference until a checkpoint is written; None for other batches."""
    groups = _whole(pending)
    return None if groups is None else Deferred(lambda: [stored(group) for group in groups])


def _seen(task: asyncio.Future[list[Group]]) -> None:
    """Retrieves the error of a batch that nobody awaits any more when a run ends, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


def _part(group: Group, rows: Sequence[int]) -> Group:
    """Returns the group of the rollouts numbered `rows`, with their scores."""
    index, scores = list(rows), group.scores
    parts = {name: np.asarray(x)[index] for name, x in scores.parts.items()}
    valid = {name: np.asarray(x)[index] for name, x in scores.valid.items()}
    return Group(rollouts=[group.rollouts[i] for i in rows], scores=replace(scores, parts=parts, valid=valid))


def stored(group: Group) -> dict[str, Any]:
    """Returns a scored group as plain values and arrays; its prompt is given by source and id."""
    prompt, scores = group.rollouts[0].prompt, group.scores
    return {
        "prompt": [prompt.source, prompt.id],
        "rollouts": [_stored_rollout(rollout) for rollout in group.rollouts],
        "parts": {name: np.asarray(x, np.float64) for name, x in scores.parts.items()},
        "valid": {name: np.asarray(x, bool) for name, x in scores.valid.items()},
        "weights": dict(scores.weights),
    }


def _stored_rollout(rollout: Rollout) -> dict[str, Any]:
    found: dict[str, Any] = {name: np.asarray(getattr(rollout, name), kind) for name, kind in _ARRAYS.items()}
    spans = {name: np.asarray(span, np.bool_) for name, span in rollout.spans.items()}
    played = {name: getattr(rollout, name) for name in _PLAYED}
    routes = {} if rollout.routes is None else {"routes": rollout.routes}
    return (
        found | {"finish": rollout.finish, "text": rollout.text, "role": rollout.role, "spans": spans} | played | routes
    )


def restored(content: Mapping[str, Any], rows: Mapping[tuple[str, str], Prompt]) -> Group:
    """Returns the group that `stored` wrote, now or in format 1; raises ValueError for a prompt that the data lacks."""
    source, name = content["prompt"]
    if (source, name) not in rows:
        raise ValueError(
            f"the checkpoint's buffer holds prompt {name!r} of {source!r}, which the data lacks: restore DATA"
        )
    rollouts = [_restored_rollout(entry, rows[source, name]) for entry in content["rollouts"]]
    scores = Scores(
        parts={part: np.asarray(x, np.float64) for part, x in content["parts"].items()},
        valid={part: np.asarray(x, bool) for part, x in content["valid"].items()}, weights=content["weights"],
    )  # fmt: skip
    return Group(rollouts=rollouts, scores=scores)


def _restored_rollout(entry: Mapping[str, Any], prompt: Prompt) -> Rollout:
    arrays: dict[str, Any] = {name: _array(entry[name], kind) for name, kind in _ARRAYS.items()}
    spans = {name: _array(span, np.bool_) for name, span in entry["spans"].items()}
    played: dict[str, Any] = {
        name: tuple(x) if isinstance(x := entry[name], list) else x for name in _PLAYED if name in entry
    }
    arrays |= {"finish": entry["finish"], "text": entry["text"], "role": entry["role"], "spans": spans}
    return Rollout(prompt=prompt, routes=entry.get("routes"), **arrays, **played)


def _array(written: np.ndarray | str, kind: Any) -> np.ndarray:
    """Decodes an array of a checkpoint, which format 1 holds as base64 text."""
    return np.frombuffer(base64.b64decode(written), kind).copy() if isinstance(written, str) else written
