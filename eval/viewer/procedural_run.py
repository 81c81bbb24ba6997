"""Writes the folder of a long run with procedural text, to try and time the viewer without any training.

`python -m jaxrl_llm.eval.viewer.procedural_run FOLDER --rollouts 100000`. Sums are asked and answered better over time, with the
files and fields of a real run.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import command_line

GROUP_SIZE = 8
PROMPTS_PER_STEP = 25
VARIETY = 64  # number of different token stats, whose creation takes most of the time
SAID = "first then carry the digit add to get so check again sum of both sides gives hence we have next column is"
WORDS = SAID.split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes rollouts.jsonl, metrics.jsonl and run.json."""
    parser = command_line.parser("eval.viewer.procedural_run", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--words", type=int, default=60, help="of a chain of thought (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(asked.seed)
    totals: dict[int, list[tuple[float, int]]] = {}
    with (asked.folder / "rollouts.jsonl").open("w", encoding="utf-8") as file:
        for line, step, reward, tokens in lines(rng, asked.rollouts, asked.words):
            file.write(line)
            totals.setdefault(step, []).append((reward, tokens))
    with (asked.folder / "metrics.jsonl").open("w") as file:
        for step, found in totals.items():
            reward, length = np.mean(found, axis=0)
            row = {"step": step, "reward/mean": reward, "response/length": length, "entropy/mean": 2 * 0.99**step}
            file.write(
                json.dumps({**row, "loss/total": rng.normal(0, 0.02), "gap/mean": abs(rng.normal(0, 1e-3))}) + "\n"
            )
    (asked.folder / "run.json").write_text(json.dumps({"seed": asked.seed, "version": "procedural"}) + "\n")
    print(f"{asked.rollouts} rollouts of {len(totals)} steps in {asked.folder}")
    return 0


def lines(rng: np.random.Generator, rollouts: int, words: int) -> Iterator[tuple[str, int, float, int]]:
    """Yields (line, step, reward, tokens) of each rollout."""
    chains = [rng.choice(WORDS, words).tolist() for _ in range(VARIETY)]
    streams = [json.dumps(_streams(rng, chain)) for chain in chains]
    for number in range(rollouts):
        group, member = divmod(number, GROUP_SIZE)
        step = group // PROMPTS_PER_STEP + 1
        if not member:
            a, b = rng.integers(100, 10_000, 2).tolist()
        right = rng.random() < 1 - 0.9 * 0.995**step
        answer = a + b if right else a + b + int(rng.integers(1, 100))
        variety = int(rng.integers(VARIETY))
        row: dict[str, Any] = {
            "step": step, "prompt": f"sums/{group}", "group": group % PROMPTS_PER_STEP, "role": "sample",
            "question": f"What is {a} + {b}? Think, then answer.",
            "response": f"<think> {' '.join(chains[variety])} {number}</think> {answer}", "reference": str(a + b),
            "source": "sums", "reward": float(right) + 0.1, "finish": "stop" if rng.random() < 0.95 else "length",
            "tokens": words + 4, "parts": {"correct": float(right), "format": 0.1},
        }  # fmt: skip
        head = json.dumps(row, ensure_ascii=False)
        of_tokens = streams[variety].replace("NUMBER", str(number)).replace("ANSWER", str(answer))
        yield f'{head[:-1]}, "streams": {of_tokens}}}\n', step, row["reward"], words + 4


def _streams(rng: np.random.Generator, chain: Sequence[str]) -> dict[str, list[Any]]:
    tokens = ["<think>", *(f" {word}" for word in chain), " NUMBER", "</think>", " ANSWER"]
    learner = -rng.exponential(0.6, len(tokens))
    values = {
        "logprob": learner, "entropy": rng.exponential(0.7, len(tokens)), "advantage": np.full(len(tokens), rng.normal()),
        "sampler_logprob": learner + rng.normal(0, 0.01, len(tokens)),
    }  # fmt: skip
    return {"token": tokens, **{n: [float(f"{x:.4g}") for x in v] for n, v in values.items()}}


if __name__ == "__main__":
    sys.exit(main())
