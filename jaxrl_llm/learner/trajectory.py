"""Bounds the branches of rollouts, so that the branches of each rollout fit one micro-batch together."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxrl_llm.experience import Branch, Group, Rollout
from jaxrl_llm.learner.batch import stretches
from jaxrl_llm.learner.packing import Packing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """The groups with rollouts that fit a batch.

    Attributes:
      groups: the groups.
      branches: number of branches that were dropped.
      tokens: number of sampled tokens in them, which are not learned from.
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
    """Warns once that branches are dropped."""
    _log.warning(
        "the branches of a rollout do not fit one micro-batch of %d rows of %d positions: its first ones are not learned from "
        "(trajectory/dropped_tokens); set train.Packing.rows or row_tokens higher, or Stage.branches_kept",
        packing.rows, packing.row_tokens,
    )  # fmt: skip


def _bounded(rollout: Rollout, packing: Packing, most: int | None, lost: list[Branch]) -> Rollout:
    """Returns the rollout with the branches that are kept, and adds the others to `lost`."""
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
