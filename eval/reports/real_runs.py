"""Compares two arms of runs, each a run folder for every seed, by what their evaluations answered to the same prompts.

    python -m jaxrl_llm.eval.reports.real_runs --a RUN_DIR... --b RUN_DIR... [--steps 0 25 50] [--ks 1 4 16 64] [--json FILE]

The runs must have written every answer (train.Stage.show_rollouts). For each evaluated step, by default the first and the last, it
prints a table in Markdown: the mean of each arm and the mean difference B - A with its 95% interval (1.96 standard errors over prompts),
each prompt's value being the mean over the arm's seeds. Where rewards are 0 or 1, there are pass@k and, of a DARLING reward, the distinct
right answers. Metrics that only a whole evaluation or step has (a monitor's F1, entropy/mean, reward/std) follow with each seed's value;
they have no interval. Those of steps are means over the last ten.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.eval.answered import KINDS, Answered, Record, value
from jaxrl_llm.eval.classes import CLASS, Classes
from jaxrl_llm.eval.compare import compare
from jaxrl_llm.eval.evaluate import summary
from jaxrl_llm.eval.maths import AtK
from jaxrl_llm.eval.ngrams import NgramDiversity
from jaxrl_llm.eval.reports.jobs import Row, rows
from jaxrl_llm.experience import Prompt

ROLLOUTS = "rollouts.jsonl"
OF_STEPS = ("entropy/mean", "reward/std", "response/length")
ENDS = ("first", "last")
LAST = 10  # steps over which a metric of steps is averaged

ByPrompt = Mapping[str, Mapping[str, float]]  # {metric: {prompt id: value}}


# -- one run -----------------------------------------------------------------------------------------------------------


def evaluated(folder: Path) -> dict[int, dict[str, list[Answered]]]:
    """Returns {step: {evaluation: its prompts with their records}} of a run.

    Raises:
      FileNotFoundError: the folder holds no rollouts.
      ValueError: an evaluation has prompts whose answers were not written.
    """
    file = folder / ROLLOUTS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no {ROLLOUTS}: give run folders (RUN_DIR)")
    found: dict[int, dict[str, dict[str, list[Record]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with file.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if str(row.get("kind", "")).startswith("eval/"):
                answers = found[row["step"]][row["kind"].removeprefix("eval/")][row["prompt"]]
                answers.append(record(row, len(answers)))
    written = {row["step"]: row for row in rows(folder)}
    for step, sets in found.items():
        for name, prompts in sets.items():
            asked = written.get(step, {}).get(f"eval/{name}/prompts")
            counts = {tuple(sum(r["kind"] == kind for r in answers) for kind in KINDS) for answers in prompts.values()}
            if asked != len(prompts) or len(counts) > 1:
                raise ValueError(
                    f"{file} holds answers to {len(prompts)} of {asked} prompts of eval/{name} at step {step}, or not all of a "
                    "prompt's: set train.Stage.show_rollouts to more than an evaluation samples, and run again"
                )
    return {step: {name: grouped(prompts) for name, prompts in sets.items()} for step, sets in found.items()}


def record(row: Row, place: int) -> Record:
    """Returns a row of rollouts.jsonl as the record that an evaluation's measures read."""
    return {
        "id": row["prompt"], "kind": row["role"], "sample": place, "response": row["response"], "finish": row["finish"],
        "tokens": row["tokens"], "score": row["reward"], "scores": row["parts"],
    }  # fmt: skip


def grouped(prompts: Mapping[str, Sequence[Record]]) -> list[Answered]:
    """Returns the prompts with their records; their texts and columns are left out."""
    return [Answered(prompt=Prompt(id=name, text=""), records=found) for name, found in prompts.items()]


def by_prompt(answered: Sequence[Answered], ks: Sequence[int]) -> dict[str, dict[str, float]]:
    """Returns {metric: {prompt id: value}} of an evaluation, of those of its measures that the answers alone decide."""
    found: dict[str, np.ndarray] = {}
    for kind in KINDS:
        if answered[0].of(kind):
            found |= {f"{kind}{name}": x for name, x in summary(answered, kind).items() if np.ndim(x)}
    samples = [r for one in answered for r in one.of("sampled")]
    most = len(answered[0].of("sampled"))
    if most > 1:
        if all(value(r) in (0, 1) or math.isnan(value(r)) for r in samples):
            found |= AtK(ks=[k for k in ks if k <= most]).measure(answered)
        if all(CLASS in r["scores"] for r in samples):
            found |= Classes().measure(answered)
        found |= NgramDiversity(sizes=(4,)).measure(answered)
    names = [one.prompt.id for one in answered]
    return {metric: dict(zip(names, map(float, x), strict=True)) for metric, x in found.items()}


def of_step(found: Sequence[Row], step: int, known: set[str]) -> dict[str, float]:
    """Returns the metrics of a step that are not `known` by prompt: those of its evaluations, and means of OF_STEPS over the last steps."""
    at = next((row for row in found if row["step"] == step), {})
    metrics = {
        n: float(x) for n, x in at.items() if n.startswith("eval/") and n not in known and not n.endswith("/prompts")
    }
    for name in OF_STEPS:
        values = [float(row[name]) for row in found if step - LAST < row["step"] <= step and row.get(name) is not None]
        if values:
            metrics[name] = sum(values) / len(values)
    return metrics


# -- two arms ----------------------------------------------------------------------------------------------------------


def over_seeds(runs: Sequence[ByPrompt], metric: str) -> dict[str, float]:
    """Returns each prompt's mean over the runs; NaN where one of them has no value."""
    found = [run[metric] for run in runs]
    shared = set(found[0]).intersection(*found[1:])
    return {prompt: float(np.mean([one[prompt] for one in found])) for prompt in sorted(shared)}


def disjoint(values: Sequence[Sequence[ByPrompt]]) -> bool:
    """Returns whether there is no prompt that all runs have."""
    return not set.intersection(*(set(next(iter(run.values()))) for arm in values for run in arm))


def table(arms: Sequence[Sequence[Path]], steps: Sequence[str], ks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields a line for each step and metric: the arms' means, the difference with its interval, or each seed's values.

    Args:
      arms: the run folders of both.
      steps: evaluated steps; "first" and "last" are each run's own, since a time limit ends runs at different steps.
      ks: values of k of pass@k.

    Raises:
      ValueError: a run has no evaluation at a step.
    """
    runs = [[(evaluated(folder), rows(folder)) for folder in arm] for arm in arms]
    for asked in steps:
        answers = [[found[_step(asked, found)] for found, _ in arm] for arm in runs]
        known: set[str] = set()
        for name in [n for n in answers[0][0] if all(n in run for arm in answers for run in arm)]:
            values = [[by_prompt(run[name], ks) for run in arm] for arm in answers]
            shared = [m for m in values[0][0] if all(m in run for arm in values for run in arm)]
            known |= {f"eval/{name}/{metric}" for metric in shared}
            if disjoint(values):
                raise ValueError(
                    f"the arms' evaluations eval/{name} have no prompt in common: compare runs on the same data"
                )
            for metric in shared:
                a, b, change = compare(*(over_seeds(arm, metric) for arm in values))
                if not change.n:  # such as n-grams of answers that have too few words
                    continue
                yield {
                    "step": asked, "metric": f"eval/{name}/{metric}", "a": a.mean, "b": b.mean, "difference": change.mean,
                    "ci95": change.ci95, "prompts": change.n,
                }  # fmt: skip
        yield from _whole([[of_step(curve, _step(asked, found), known) for found, curve in arm] for arm in runs], asked)


def _step(asked: str, evaluations: Mapping[int, Any]) -> int:
    """Returns the evaluated step of a run that `asked` stands for."""
    if evaluations and asked in ENDS:
        return min(evaluations) if asked == ENDS[0] else max(evaluations)
    if not asked.isdecimal() or int(asked) not in evaluations:
        raise ValueError(
            f"a run has no evaluation at step {asked}; it has those at {sorted(evaluations)}: name such --steps, or {ENDS}"
        )
    return int(asked)


def _whole(found: Sequence[Sequence[Mapping[str, float]]], step: str) -> Iterator[dict[str, Any]]:
    for metric in [m for m in found[0][0] if all(m in run for arm in found for run in arm)]:
        seeds = [[run[metric] for run in arm] for arm in found]
        a, b = (float(np.mean(values)) for values in seeds)
        yield {
            "step": step, "metric": metric, "a": a, "b": b, "difference": b - a, "a_seeds": seeds[0], "b_seeds": seeds[1]
        }  # fmt: skip


def written(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns the lines as a table in Markdown."""
    head = "| step | metric | A | B | B - A | prompts, or each seed's value |\n|---|---|---|---|---|---|\n"
    return head + "".join(
        f"| {x['step']} | {x['metric']} | {x['a']:.4g} | {x['b']:.4g} | {x['difference']:+.4g}"
        + (
            f" +- {x['ci95']:.2g} | {x['prompts']} |\n"
            if "prompts" in x
            else f" | {_listed(x['a_seeds'])}; {_listed(x['b_seeds'])} |\n"
        )
        for x in lines
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{x:.4g}" for x in values)


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.reports.real_runs", __doc__)
    parser.add_argument("--a", type=Path, nargs="+", required=True, help="run folders of the first arm, one a seed")
    parser.add_argument("--b", type=Path, nargs="+", required=True, help="run folders of the second arm")
    parser.add_argument("--steps", nargs="+", default=ENDS, help="evaluated steps (default: each run's first and last)")
    parser.add_argument("--ks", type=int, nargs="+", default=[1, 4, 16, 64], help="values of k of pass@k")
    parser.add_argument("--json", type=Path, help="file that the lines are written to as well")
    given = parser.parse_args(argv)
    lines = list(table([given.a, given.b], given.steps, given.ks))
    if given.json is not None:
        given.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    print(written(lines), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
