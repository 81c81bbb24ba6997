"""Draws from a vLLM engine in three ways and writes what it said: `python tests/vllm_draws.py MODEL PROMPTS OUT HEAD`, of tests/gpu_vllm_invariant.py.

PROMPTS is a JSON file of lists of token ids, OUT the JSON file to write, HEAD the element type of the head's logits. Runs in the Python that has vLLM.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

TOKENS, FEW = 256, 16


def draw(engine: LLM, prompts: list[list[int]], first: int) -> list[dict[str, Any]]:
    """One sample of each prompt at temperature 1; prompt i's seed is `first` + i."""
    asked = [
        SamplingParams(temperature=1.0, max_tokens=TOKENS, logprobs=0, seed=first + i) for i in range(len(prompts))
    ]
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    samples = [one.outputs[0] for one in found]
    return [
        {
            "tokens": list(s.token_ids),
            "logprobs": [at[t].logprob for at, t in zip(s.logprobs, s.token_ids, strict=True)],
        }
        for s in samples
    ]


def read(engine: LLM, texts: list[list[int]]) -> list[list[float]]:
    """The log-prob of each token of the texts but the first, as the engine reads a prompt."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = engine.generate([{"prompt_token_ids": ids} for ids in texts], asked, use_tqdm=False)
    return [
        [at[t].logprob for at, t in zip(one.prompt_logprobs[1:], ids[1:], strict=True)]
        for one, ids in zip(found, texts)
    ]


def main() -> None:
    model, prompts, out, head = sys.argv[1:]
    asked = json.loads(Path(prompts).read_text())
    more = {"hf_overrides": {"head_dtype": "float32"}} if head == "float32" else {}
    engine = LLM(
        model=model, dtype="bfloat16", max_model_len=1024, max_num_seqs=len(asked), gpu_memory_utilization=0.3,
        enable_prefix_caching=False, **more,
    )  # fmt: skip
    draw(engine, asked, 10**6)  # kernels that are compiled at their first call
    began = time.perf_counter()
    together = draw(engine, asked, 0)
    seconds = time.perf_counter() - began
    few = [one for i in range(0, len(asked), FEW) for one in draw(engine, asked[i : i + FEW], i)]
    again = read(engine, [ids + one["tokens"] for ids, one in zip(asked, together, strict=True)])
    Path(out).write_text(json.dumps({"together": together, "few": few, "read": again, "seconds": seconds}))


if __name__ == "__main__":
    main()
