"""Answered prompts from a few values."""

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.eval.answered import Answered
from jaxrl_llm.experience import Prompt


def record(kind: str, sample: int, text: str | None, score: float | None, **parts: float) -> dict[str, Any]:
    return {
        "id": "p", "kind": kind, "sample": sample, "prompt": "p?", "reference": "", "source": "", "response": text or "",
        "finish": "stop", "tokens": 1, "answer": text, "score": score, "scores": {"part": score, **parts},
    }  # fmt: skip


def answered(
    name: str,
    *,
    greedy: tuple[str, float | None] | None = None,
    sampled: Sequence[tuple[str | None, float | None]] = (),
    parts: Sequence[dict[str, float]] = (),
    **extra: Any,
) -> Answered:
    """A prompt with (response, score) of each kind; the response is its answer too; `parts` belong to the samples."""
    records = [record("greedy", 0, *greedy)] if greedy else []
    more = parts or [{} for _ in sampled]
    records += [record("sampled", i, *each, **more[i]) for i, each in enumerate(sampled)]
    return Answered(prompt=Prompt(id=name, text=f"{name}?", reference="A", extra=extra), records=records)
