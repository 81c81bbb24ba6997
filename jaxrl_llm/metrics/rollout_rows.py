"""Makes rollout rows, the readable records of rollouts.jsonl: texts, rewards by part, and token stats.

The field "streams" comes last: "token" holds the text that each of the first tokens adds, and every other name holds one
value a token, null where the policy did not choose the token; "rest" is the text of the tokens after those.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.batch import Advantages
from jaxrl_llm.experience import Group, Rollout
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.metrics import trajectories

DIGITS = 4  # significant digits of a token's value

Row = dict[str, Any]


def of_step(
    batch: Batch, stats: Mapping[str, np.ndarray], advantages: Advantages, *, tokenizer: Any, rollouts: int, tokens: int
) -> list[Row]:
    """Returns rows of a step's first rollouts, with the token stats of their first tokens.

    Args:
      batch: the step's groups.
      stats: the learner's token stats [S, T]; where this is empty, the rows have neither token stats nor advantages.
      advantages: the algorithm's advantages.
      tokenizer: decodes tokens.
      rollouts: most rollouts.
      tokens: most tokens of a rollout for which token stats are given; 0 leaves token stats out.
    """
    known = {"logprob": stats.get("old_logprobs"), "entropy": stats.get("entropy"), "advantage": advantages.advantages}
    known["sampler_logprob"] = batch.fields["sampler_logprobs"]
    values = {name: x for name, x in known.items() if x is not None} if stats else {}
    rows = _rows(batch.groups, rollouts)
    for i, (row, rollout) in enumerate(zip(rows, batch.rollouts, strict=False)):
        row |= _played(rollout, tokenizer) | token_streams(
            rollout, {n: x[i] for n, x in values.items()}, tokenizer, tokens
        )
    return rows


def held_out(
    name: str, kinds: Sequence[str], groups: Sequence[Group], *, tokenizer: Any, rollouts: int, tokens: int
) -> list[Row]:
    """Returns rows of the first rollouts of each kind ("greedy", "sampled") of the evaluation `name`; `groups` are ordered by kind.

    The other arguments are those of `of_step`.
    """
    chosen: list[Row] = []
    prompts = len(groups) // len(kinds)
    for place, kind in enumerate(kinds):
        alike = groups[place * prompts : (place + 1) * prompts]
        answers = [r for g in alike for r in g.rollouts]
        for row, rollout in zip(_rows(alike, rollouts), answers, strict=False):
            streams = token_streams(rollout, {"sampler_logprob": rollout.sampler_logprobs}, tokenizer, tokens)
            chosen.append({"kind": f"eval/{name}", **row, "role": kind, **_played(rollout, tokenizer), **streams})
    return chosen


def pieces(tokens: np.ndarray, tokenizer: Any) -> list[str]:
    """Returns the text that each token adds; a character made of several tokens counts for the last, so that the pieces join to the whole text.

    A token is decoded together with the tokens of the piece before it, since alone some would lose a leading space.
    """
    ids = tokens.tolist()
    found, before, start = [], 0, 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[before:end], skip_special_tokens=False)
        if text.endswith("\ufffd") and end < len(ids):
            found.append("")
            continue
        found.append(text[len(tokenizer.decode(ids[before:start], skip_special_tokens=False)) :])
        before, start = start, end
    return found


def _rows(groups: Sequence[Group], count: int) -> list[Row]:
    rows: list[Row] = []
    for number, group in enumerate(groups):
        totals, valid = group.total(), group.valid()
        for i, rollout in enumerate(group.rollouts):
            if len(rows) == count:
                return rows
            parts = {n: float(v[i]) if group.scores.valid[n][i] else None for n, v in group.scores.parts.items()}
            prompt = rollout.prompt
            rows.append({
                "prompt": prompt.id, "group": number, "role": rollout.role, "question": prompt.whole, "response": rollout.text,
                "reference": prompt.reference, "source": prompt.source, "reward": float(totals[i]) if valid[i] else None,
                "finish": rollout.finish, "tokens": len(rollout.tokens), "parts": parts,
            })  # fmt: skip
    return rows


def _played(rollout: Rollout, tokenizer: Any) -> Row:
    """Returns the fields of a rollout that an environment or an agent played; {} for a single turn."""
    return trajectories.record(rollout, tokenizer) if rollout.info or rollout.error or rollout.branches else {}


def token_streams(rollout: Rollout, values: Mapping[str, np.ndarray], tokenizer: Any, most: int) -> dict[str, Row]:
    """Returns {"streams": text pieces and values of the first `most` tokens, and the text of the rest}, or {} where `most` is 0."""
    if most < 1:
        return {}
    n = min(len(rollout.tokens), most)
    found: Row = {"token": pieces(rollout.tokens[:n], tokenizer)}
    for name, stream in values.items():
        found[name] = [_short(x) if m else None for x, m in zip(stream[:n], rollout.mask[:n], strict=True)]
    if n < len(rollout.tokens):
        found["rest"] = tokenizer.decode(rollout.tokens[n:].tolist(), skip_special_tokens=False)
    return {"streams": found}


def _short(x: Any) -> float | None:
    return float(f"{float(x):.{DIGITS}g}") if np.isfinite(x) else None
