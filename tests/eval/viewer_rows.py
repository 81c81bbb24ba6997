"""Rows of rollouts and records of results as their writers write them, for tests of the viewer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.eval.results import Results
from jaxrl_llm.metrics.writers import Jsonl

Row = dict[str, Any]


def rollout(prompt: str, response: str, reward: float | None, **more: Any) -> Row:
    return {
        "prompt": prompt, "group": 0, "role": "sample", "question": f"question {prompt}", "response": response,
        "reference": "gold", "source": "s", "reward": reward, "finish": "stop", "tokens": 3, "parts": {"r": reward}, **more,
    }  # fmt: skip


def record(prompt: str, sample: int, response: str, score: float | None, **more: Any) -> Row:
    return {
        "id": prompt, "kind": "sampled", "sample": sample, "prompt": f"question {prompt}", "reference": "gold",
        "source": "s", "response": response, "finish": "stop", "tokens": 3, "score": score, "scores": {"r": score}, **more,
    }  # fmt: skip


def write_run(folder: Path, steps: dict[int, Sequence[Row]]) -> Path:
    """A run's folder, by the writer that runs have."""
    writer = Jsonl().open(folder, None)
    for step, rows in steps.items():
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        writer.write(step, {"reward/mean": sum(rewards) / max(len(rewards), 1), "response/length": 3.0})
        writer.rollouts(step, rows)
    (folder / "run.json").write_text(json.dumps({"seed": 3, "commit": "abc"}))
    return folder


def write_results(folder: Path, records: Sequence[Row]) -> Path:
    """An evaluation's folder, one group a prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[Row]] = {}
    for one in records:
        groups.setdefault(one["id"], []).append(one)
    results = Results(folder, {(name, "sampled"): len(group) for name, group in groups.items()})
    for group in groups.values():
        results.add(group)
    (folder / "identity.json").write_text(json.dumps({"schema": 1}))
    return folder
