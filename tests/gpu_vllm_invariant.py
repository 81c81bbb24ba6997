"""How far a stock vLLM is from itself and from the learner, with its batch-invariant mode and without it, on one Hopper GPU.

    XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=. python tests/gpu_vllm_invariant.py --model FOLDER --questions gsm8k/test.jsonl

An engine draws an answer to each of --count questions, all at once; the same with 16 at once, by the same seeds; and reads the first answers as
prompts. The learner reads them in packed rows, in the default mode and in the bitwise one. A JSON line a comparison: tokens, those of which the
log-prob differs in any bit, the mean and the largest difference. `--python` and `--python-path` name where vLLM is, if not here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, __file__.rpartition("/")[0])

from bitwise_rows import differing, learned
from transformers import AutoTokenizer

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.policy import Policy


def compared(one: list[Any], other: list[Any]) -> dict[str, Any]:
    a, b = (np.concatenate([np.asarray(x, np.float32) for x in values]) for values in (one, other))
    apart = np.abs(a.astype(np.float64) - b)
    return {"tokens": len(a), "differing": differing(a, b), "mean": float(apart.mean()), "largest": float(apart.max())}


def drawn(given: argparse.Namespace, prompts: list[list[int]], invariant: bool) -> dict[str, Any]:
    """What tests/vllm_draws.py found in a process of its own."""
    path = os.pathsep.join([*given.python_path, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_BATCH_INVARIANT": str(int(invariant)), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder, "prompts.json"), Path(folder, "drawn.json")
        asked.write_text(json.dumps(prompts))
        script = str(Path(__file__).with_name("vllm_draws.py"))
        command = [given.python, script, str(given.model), str(asked), str(out), given.head]
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)  # what vLLM says is seen while it works
        return json.loads(out.read_text())


def of_itself(found: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """The draws of all at once beside those of a few at once, as far as their tokens are the same, and beside what the engine reads."""
    one, other = [], []
    for a, b in zip(found["together"], found["few"], strict=True):
        same = next(
            (i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])) if x != y),
            min(len(a["tokens"]), len(b["tokens"])),
        )
        one.append(a["logprobs"][:same])
        other.append(b["logprobs"][:same])
    whole = sum(a["tokens"] == b["tokens"] for a, b in zip(found["together"], found["few"], strict=True))
    read = [x[len(ids) - 1 :] for x, ids in zip(found["read"], prompts, strict=True)]
    count = sum(len(x["tokens"]) for x in found["together"])
    return {
        "answers": len(prompts), "same_answers": whole, "tokens_per_s": count / found["seconds"],
        "all_and_16_at_once": compared(one, other), "drawn_and_read": compared([x["logprobs"] for x in found["together"]], read),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with a column `question`")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--head", choices=("bfloat16", "float32"), default="float32", help="of vLLM's logits")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--python-path", nargs="*", default=())
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    questions = [json.loads(line)["question"] for line in given.questions.read_text().splitlines()[: given.count]]
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
            )
        )
        for q in questions
    ]
    everything = {invariant: drawn(given, prompts, invariant) for invariant in (False, True)}
    for bitwise in (False, True):
        partitioner = Partitioner.create(MeshConfig(), jax.devices()[:1])
        policy = Policy(hf_weights.architecture(given.model), partitioner, "bfloat16", bitwise=bitwise)
        params = hf_weights.load(policy, given.model)
        for invariant, found in everything.items():
            if not bitwise:
                print(
                    json.dumps({"vllm": "invariant" if invariant else "default", **of_itself(found, prompts)}),
                    flush=True,
                )
            sequences = [
                np.asarray([*ids, *x["tokens"]], np.int32) for ids, x in zip(prompts, found["together"], strict=True)
            ]
            read = learned(policy, params, sequences, 2048)
            own = [x[len(ids) - 1 :] for x, ids in zip(read, prompts, strict=True)]
            row = {"vllm": "invariant" if invariant else "default", "learner": "bitwise" if bitwise else "default"}
            print(json.dumps(row | compared([x["logprobs"] for x in found["together"]], own)), flush=True)


if __name__ == "__main__":
    main()
