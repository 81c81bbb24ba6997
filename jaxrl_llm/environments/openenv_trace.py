"""Exports a rollout as the `TrainingTrace` of OpenEnv, for trainers and viewers that read such traces."""

from collections.abc import Iterator
from typing import Any

from jaxrl_llm.experience import Branch, Rollout, Turn


def export(rollout: Rollout) -> dict[str, Any]:
    """Returns the JSON of a TrainingTrace (schema_version 1): each call of the policy once, in their order.

    Its "turns" are also what `TrainingTrace.from_entries` takes. The mask of a turn is 0 on its prompt, and 1 on the tokens that are learned from; the
    rewards and the validity of the rollout are no part of a trace.
    """
    found: dict[int, dict[str, Any]] = {}
    for branch in rollout.paths:
        for turn in branch.turns or (Turn(start=0, end=len(branch.tokens), call=0),):
            if turn.call not in found or branch.mask[turn.start : turn.end].any():
                found[turn.call] = dict(_entry(branch, turn))
    return {"schema_version": 1, "turns": [found[call] for call in sorted(found)]}


def _entry(branch: Branch, turn: Turn) -> Iterator[tuple[str, Any]]:
    prompt = [*branch.prefix.tolist(), *branch.tokens[: turn.start].tolist()]
    within = slice(turn.start, turn.end)
    yield "node_id", f"call-{turn.call}"
    yield "prompt_token_ids", prompt
    yield "completion_token_ids", branch.tokens[within].tolist()
    yield "per_token_logps", [min(0.0, float(x)) for x in branch.sampler_logprobs[within]]
    yield "loss_mask", [0] * len(prompt) + [int(x) for x in branch.mask[within]]
    yield "metadata", {"node_id": f"call-{turn.call}", "versions": branch.versions[within].tolist()}
