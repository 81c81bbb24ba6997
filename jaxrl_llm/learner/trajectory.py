"""Rollouts of several branches in a batch: one row of tokens for the algorithm, and the exact sequences that the model reads.

The row of a rollout holds the tokens of its branches one after the other in the order of their calls, so that statistics of groups,
means over a sequence, ratios of a sequence and generalised advantages are those of the whole trajectory: a return flows from a later
branch to the tokens of an earlier one, as time does. The model reads each branch with what came before it, and each sampled token is
learned from where its branch's mask says so, which is once.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_llm.experience import Branch, Group, Rollout
from jaxrl_llm.learner.packing import Packing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A sequence that the model reads, with its place in the rollout's row.

    Attributes:
      prefix: int32 [P] what comes before.
      tokens: int32 [T] tokens of the row.
      offset: place of the first of them in the row.
    """

    prefix: np.ndarray
    tokens: np.ndarray
    offset: int

    @property
    def positions(self) -> int:
        """The positions that it takes in a packed row."""
        return len(self.prefix) + len(self.tokens) - 1


def learned_range(branch: Branch) -> tuple[int, int]:
    """(first, end) of the tokens from the first to the last that is learned from in the branch; (0, 0) where none is."""
    places = np.flatnonzero(branch.mask)
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _cuts(rollout: Rollout) -> list[tuple[Branch, int, int, int]]:
    """(branch, first, end, offset of the branch in `rollout.spans`) of each branch that has a token to learn from."""
    if len(rollout.branches) < 2:
        (branch,) = rollout.paths
        return [(branch, 0, len(branch.tokens), 0)]
    starts = np.cumsum([0, *(len(b.tokens) for b in rollout.branches)]).tolist()
    ranges = [(b, *learned_range(b), start) for b, start in zip(rollout.branches, starts, strict=False)]
    return [cut for cut in ranges if cut[2] > cut[1]] or [(rollout.branches[-1], 0, len(rollout.tokens), starts[-2])]


def stretches(rollout: Rollout) -> list[Stretch]:
    """The sequences that the model reads for a rollout; of several branches, what comes before the learned tokens is prefix."""
    found, offset = [], 0
    for branch, first, end, _ in _cuts(rollout):
        prefix = np.concatenate([branch.prefix, branch.tokens[:first]]) if first else branch.prefix
        found.append(Stretch(prefix=prefix, tokens=branch.tokens[first:end], offset=offset))
        offset += end - first
    return found


def row(rollout: Rollout) -> Rollout:
    """The rollout with the arrays of its row: its own where it has one branch, else those of its stretches joined."""
    if len(rollout.branches) < 2:
        return rollout
    cuts = _cuts(rollout)
    joined = lambda name: np.concatenate([getattr(b, name)[first:end] for b, first, end, _ in cuts])  # noqa: E731
    spans = {
        name: np.concatenate([span[start + first : start + end] for _, first, end, start in cuts])
        for name, span in rollout.spans.items()
    }
    names = ("tokens", "sampler_logprobs", "mask", "versions")
    arrays: dict[str, Any] = {name: joined(name) for name in names}
    return replace(rollout, spans=spans, turns=(), **arrays)


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """Groups whose rollouts fit a batch.

    Attributes:
      groups: the groups.
      branches: number of branches that were left out.
      tokens: number of sampled tokens that are not learned from for it.
    """

    groups: Sequence[Group]
    branches: int = 0
    tokens: int = 0


def bounded(groups: Sequence[Group], packing: Packing, most: int | None) -> Bounded:
    """Keeps the last `most` branches of each rollout, and as many of them as fit one micro-batch together.

    A rollout's branches share a micro-batch, since its loss may depend on all of its tokens at once.
    """
    lost: list[Branch] = []
    kept = []
    for group in groups:
        rollouts = [_bounded(rollout, packing, most, lost) for rollout in group.rollouts]
        kept.append(replace(group, rollouts=rollouts))
    return Bounded(groups=kept, branches=len(lost), tokens=sum(int(branch.mask.sum()) for branch in lost))


@functools.cache
def _say_too_large(packing: Packing) -> None:
    """Warns, once."""
    _log.warning(
        "the branches of a rollout do not fit one micro-batch of %d rows of %d positions: its first ones are not learned from "
        "(trajectory/dropped_tokens); set train.Packing.rows or row_tokens higher, or Stage.branches_kept",
        packing.rows, packing.row_tokens,
    )  # fmt: skip


def _bounded(rollout: Rollout, packing: Packing, most: int | None, lost: list[Branch]) -> Rollout:
    """The rollout with the branches that are kept; those that are not are added to `lost`."""
    count = len(rollout.branches)
    if count < 2:
        return rollout
    keeps = count if most is None else min(most, count)
    whole = stretches(replace(rollout, branches=rollout.branches[count - keeps :], spans={}))
    while keeps > 1 and not packing.fits([stretch.positions for stretch in whole]):
        _say_too_large(packing)
        keeps -= 1
        whole = stretches(replace(rollout, branches=rollout.branches[count - keeps :], spans={}))
    if keeps == count:
        return rollout
    lost += rollout.branches[: count - keeps]
    before = sum(len(branch.tokens) for branch in rollout.branches[: count - keeps])
    spans = {name: span[before:] for name, span in rollout.spans.items()}
    return replace(rollout, branches=rollout.branches[count - keeps :], spans=spans)
