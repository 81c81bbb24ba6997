"""Queries of the viewer's page: groups of rollouts by filters, order and text, and comparisons on the same prompts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.eval.answered import estimate
from jaxrl_llm.eval.viewer.rollout_index import RolloutIndex

PAGE = 50  # groups, or compared prompts, per page
SHOWN = 32  # rollouts of a group that are sent at once
SEARCH_S = 0.12
EXCERPT = 160  # characters of a question
ALIKE = 60

ORDERS = ("file", "low reward", "high reward", "spread", "long")


@dataclass(frozen=True, kw_only=True)
class Query:
    """Filters of rollouts; an empty filter passes everything.

    Attributes:
      step: the run's step.
      kind: "train", "eval/NAME" or "results".
      role: "sample", "greedy" or "sampled".
      finish: the rollout's finish reason.
      source: data source.
      prompt: the prompt's id.
      low: lowest reward; an invalid reward does not pass.
      high: highest reward; an invalid reward does not pass.
      text: a text that occurs in the question, response, reference or prompt id.
      order: one of ORDERS.
    """

    step: int | None = None
    kind: str = ""
    role: str = ""
    finish: str = ""
    source: str = ""
    prompt: str = ""
    low: float = -math.inf
    high: float = math.inf
    text: str = ""
    order: str = "file"

    @classmethod
    def of(cls, asked: Mapping[str, str]) -> "Query":
        """Parses a URL's parameters; raises ValueError that names a bad one."""
        known: dict[str, Any] = {n: asked.get(n, "") for n in ("kind", "role", "finish", "source", "prompt", "text")}
        for name, kind in (("step", int), ("low", float), ("high", float)):
            if asked.get(name):
                try:
                    known[name] = kind(asked[name])
                except ValueError as error:
                    raise ValueError(f"{name} must be a number (got {asked[name]!r})") from error
        order = asked.get("order") or "file"
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)} (got {order!r})")
        return cls(**known, order=order)


def rows_of(index: RolloutIndex, query: Query) -> np.ndarray:
    """Returns the numbers of the rows that pass every filter except the text, in the file's order."""
    columns = index.columns
    passing = np.ones(len(columns["offset"]), bool)
    for name in index.names:
        if wanted := getattr(query, name):
            passing &= columns[name] == index.names[name].find(wanted)
    if query.step is not None:
        passing &= columns["step"] == query.step
    if query.low > -math.inf:
        passing &= columns["reward"] >= query.low
    if query.high < math.inf:
        passing &= columns["reward"] <= query.high
    return np.flatnonzero(passing)


def groups(index: RolloutIndex, query: Query, after: int = 0) -> dict[str, Any]:
    """Returns a page of groups that have a passing row, from the cursor `after` on.

    Returns:
      "groups": the output of `_described`; "rows": number of rows that pass the filters except the text; "total": number of their groups;
      "next": cursor of the next page, or null.
    """
    passing = rows_of(index, query)
    group = index.columns["group"]
    ordered = _ordered(index, np.unique(group[passing]), query.order)
    total = {"rows": len(passing), "total": len(ordered)}
    if not query.text:
        page, after = ordered[after : after + PAGE], after + PAGE
        return {**total, "groups": _described(index, page, passing), "next": after if after < len(ordered) else None}
    rank = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    rank[ordered] = np.arange(len(ordered))
    among = passing[np.argsort(rank[group[passing]], kind="stable")]
    found, settled = index.search(among[after:], query.text, SEARCH_S, PAGE)
    after += settled
    page = np.array(list(dict.fromkeys(group[found].tolist())), np.int64)
    described = _described(index, page, np.array(found, np.int64))
    return {**total, "groups": described, "settled": after, "next": after if after < len(among) else None}


def _ordered(index: RolloutIndex, chosen: np.ndarray, order: str) -> np.ndarray:
    if order == "file" or not len(chosen):
        return chosen
    columns = index.columns
    group, reward = columns["group"], columns["reward"]
    known = ~np.isnan(reward)
    count = np.maximum(np.bincount(group, known), 1)
    mean = np.bincount(group, np.where(known, reward, 0)) / count
    square = np.bincount(group, np.where(known, reward**2, 0)) / count
    length = np.bincount(group, columns["tokens"])
    keys = {"low reward": mean, "high reward": -mean, "spread": mean**2 - square, "long": -length}
    return chosen[np.argsort(keys[order][chosen], kind="stable")]


def _described(index: RolloutIndex, chosen: np.ndarray, matched: np.ndarray) -> list[dict[str, Any]]:
    """Describes each group: its step, prompt, kind, the rewards of its rows, which of them match, and an excerpt of its question."""
    columns = index.columns
    members = np.flatnonzero(np.isin(columns["group"], chosen))
    of_group: dict[int, list[int]] = {int(g): [] for g in chosen}
    for row in members.tolist():
        of_group[int(columns["group"][row])].append(row)
    passing = set(matched.tolist())
    firsts = index.rows([rows[0] for rows in of_group.values()])
    questions = [" ".join(str(first["question"]).split()) for first in firsts]
    # Prompts with the same beginning, such as worked examples, are distinguished by their ends.
    alike = len({q[:ALIKE] for q in questions}) == 1 < len(set(questions))
    return [
        {
            "group": group, "step": first["step"], "prompt": first["prompt"], "kind": first["kind"], "size": len(rows),
            "rewards": [_known(columns["reward"][r]) for r in rows[:SHOWN]], "matched": [r in passing for r in rows[:SHOWN]],
            "excerpt": question[-EXCERPT:] if alike else question[:EXCERPT],
        }
        for (group, rows), first, question in zip(of_group.items(), firsts, questions, strict=True)
    ]  # fmt: skip


def members(index: RolloutIndex, query: Query, first: int = 0) -> dict[str, Any]:
    """Returns the rows of one prompt with their token stats, SHOWN of them from row `first` on, and their total number."""
    found = rows_of(index, query)
    return {"rows": index.rows(found[first : first + SHOWN].tolist(), streams=True), "total": len(found)}


def steps(index: RolloutIndex, kind: str = "") -> list[dict[str, Any]]:
    """Returns each step with its number of rollouts and mean reward."""
    rows = rows_of(index, Query(kind=kind))
    found, inverse = np.unique(index.columns["step"][rows], return_inverse=True)
    reward = index.columns["reward"][rows]
    known = ~np.isnan(reward)
    count, graded = np.bincount(inverse), np.bincount(inverse, known)
    total = np.bincount(inverse, np.where(known, reward, 0))
    return [
        {"step": s, "rollouts": int(n), "reward": float(t / g) if g else None}
        for s, n, t, g in zip(found.tolist(), count, total, graded, strict=True)
    ]


def compare(a: tuple[RolloutIndex, Query], b: tuple[RolloutIndex, Query], after: int = 0) -> dict[str, Any]:
    """Compares two sides on the prompts that both answered: mean rewards and paired differences, the greatest first."""
    one, other = (_by_prompt(*side) for side in (a, b))
    shared = [p for p in one if p in other]
    pairs = np.array([(one[p], other[p]) for p in shared], np.float64).reshape(-1, 2)
    change = pairs[:, 1] - pairs[:, 0]
    order = np.argsort(-np.abs(np.nan_to_num(change)), kind="stable")
    both = ~np.isnan(change)
    found = {n: estimate(x[both]) for n, x in (("a", pairs[:, 0]), ("b", pairs[:, 1]), ("difference", change))}
    return {
        "prompts": [
            {"prompt": shared[i], "a": _known(pairs[i, 0]), "b": _known(pairs[i, 1])}
            for i in order[after : after + PAGE].tolist()
        ],
        "shared": len(shared), "only_a": len(one) - len(shared), "only_b": len(other) - len(shared),
        "next": after + PAGE if after + PAGE < len(shared) else None,
        "summary": {n: {"mean": _known(e.mean), "ci95": _known(e.ci95), "n": e.n} for n, e in found.items()},
    }  # fmt: skip


def _by_prompt(index: RolloutIndex, query: Query) -> dict[str, float]:
    """Returns the mean reward of each prompt; NaN where no row has a reward."""
    rows = rows_of(index, query)
    prompt, reward = index.columns["prompt"][rows], index.columns["reward"][rows]
    known = ~np.isnan(reward)
    graded = np.bincount(prompt, known)
    total = np.bincount(prompt, np.where(known, reward, 0))
    names = index.names["prompt"].all
    return {names[p]: float(total[p] / graded[p]) if graded[p] else math.nan for p in np.unique(prompt).tolist()}


def _known(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None
