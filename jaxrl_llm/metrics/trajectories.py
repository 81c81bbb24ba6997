"""Metrics and readable records of rollouts that environments and agents played: branches, turns, tools, and text of others in between."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jaxrl_llm.experience import Branch, Group, Rollout
from jaxrl_llm.learner.batch import learned_range
from jaxrl_llm.learner.trajectory import Bounded


def of_groups(groups: Sequence[Group], bounded: Bounded | None = None) -> dict[str, float]:
    """Returns means per rollout over a step's sampled rollouts; {} where no environment or agent played them.

    Args:
      groups: the collected groups, with all of their branches.
      bounded: the parts of them that are learned from.
    """
    played = [r for g in groups for r in g.rollouts if r.role == "sample" and "session" in r.info]
    if not played:
        return {}
    count, session = len(played), Counter[str]()
    for rollout in played:
        session.update({name: float(x) for name, x in rollout.info["session"].items()})
    calls = Counter[str]()
    for rollout in played:
        calls.update(rollout.info.get("calls", {}))
    forks = {name: total / count for name, total in session.items() if name.startswith("fork/")}
    found = {
        "trajectory/branches": sum(len(r.paths) for r in played) / count,
        "trajectory/branches_max": float(max(len(r.paths) for r in played)),
        "trajectory/turns": session["calls"] / count,
        "trajectory/duplicated": session["duplicated_tokens"] / max(session["branch_tokens"], 1),
        "trajectory/told_tokens": sum(map(_told, played)) / count,
        "trajectory/environment_s": sum(float(r.info.get("environment_s", 0.0)) for r in played) / count,
        "trajectory/invalid": sum(not r.valid for r in played) / count,
    }
    found |= {f"trajectory/{name}": value for name, value in forks.items()}
    found |= {f"trajectory/calls/{status}": number / count for status, number in calls.items()}
    found |= {
        f"trajectory/{name}": sum(r.info.get(name, 0) for r in played) / count
        for name in ("blocks", "failed_blocks")
        if any(name in r.info for r in played)
    }
    found |= {f"trajectory/stop/{stop}": n / count for stop, n in Counter(r.info["stop"] for r in played).items()}
    if bounded is not None:
        found |= {
            "trajectory/dropped_branches": float(bounded.branches),
            "trajectory/dropped_tokens": float(bounded.tokens),
        }
    return found


def _told(rollout: Rollout) -> int:
    """Returns the number of tokens of others between those that the branches learn from."""
    within = [(piece, learned_range(branch)) for branch in rollout.paths for piece in pieces(branch)]
    return sum(max(min(end, last) - max(first, begin), 0) for (by, first, end), (begin, last) in within if by == "told")


def record(rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    """Returns a readable row's fields beside those of a single turn: how the rollout ended, its rewards, and its branches.

    A branch's "pieces" join to its text: each has "by", which is "policy" (learned from), "copied" (sampled, and learned from in an
    earlier branch) or "told" (from an environment or a tool), and "text".
    """
    branches = [
        {
            "prefix": tokenizer.decode(branch.prefix.tolist(), skip_special_tokens=False),
            "finish": branch.finish,
            "turns": [[turn.start, turn.end, turn.call] for turn in branch.turns],
            "pieces": [
                {"by": by, "text": tokenizer.decode(branch.tokens[first:end].tolist(), skip_special_tokens=False)}
                for by, first, end in pieces(branch)
            ],
        }
        for branch in rollout.paths
    ]
    rewards: Mapping[str, Any] = dict(rollout.rewards)
    return {
        "valid": rollout.valid,
        "error": rollout.error,
        "rewards": rewards,
        "info": dict(rollout.info),
        "branches": branches,
    }


def pieces(branch: Branch) -> list[tuple[str, int, int]]:
    """Returns (writer, first token, end) of each stretch of a branch with one writer, in order."""
    drawn = np.zeros(len(branch.tokens), np.int8)
    for turn in branch.turns:
        drawn[turn.start : turn.end] = 1
    kinds = np.where(branch.mask, 2, drawn)
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)] if len(kinds) else [0]
    names = ("told", "copied", "policy")
    return [(names[kinds[first]], first, end) for first, end in pairwise(edges)]
