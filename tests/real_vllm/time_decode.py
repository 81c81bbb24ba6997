"""Times generation of a shape with random weights by the embedded sampler and by stock vLLM, one after the other on the same GPU.

    PYTHONPATH=. python tests/real_vllm/time_decode.py --model qwen3.5-0.8b --folder /dev/shm/decode [--python-path FOLDER]
    PYTHONPATH=. python tests/real_vllm/time_decode.py --model qwen3-30b-a3b --layers 12 --folder /dev/shm/decode
    PYTHONPATH=. python tests/real_vllm/time_decode.py --model qwen2.5-0.5b --group 1 --prompt 1024 --tokens 1024 --shortest 100 --shrink 2 --chunk 32 --folder ...

Both draw 512 tokens for each of 256 sequences, eight a prompt of 128 tokens; the embedded sampler by `bench --work=sample`. The last line is
the load of nano-vllm's benchmark: prompts and responses of 100 to 1,024 tokens, of lengths drawn at random with seed 0. A hybrid shape is given to vLLM as Qwen3-Next without experts, whose layers are those of Qwen3.5, with states in float32. Prints one line of JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HYBRID = {
    "mamba_ssm_cache_dtype": "float32",
    "additional_config": {"gdn_prefill_backend": "triton"},
}  # another package has its default
VLLM = """
import json, sys, time
import numpy as np
from vllm import LLM, SamplingParams
given = json.loads(sys.argv[1])
if given["dense"]:
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
    Qwen3NextForCausalLM.set_moe_parameters = lambda self: None
    # With as many heads of keys as of values, its strengths and rates are views that its kernel of one token refuses.
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layer
    one = layer.fused_recurrent_gated_delta_rule_packed_decode
    layer.fused_recurrent_gated_delta_rule_packed_decode = lambda *, a, b, **more: one(a=a.contiguous(), b=b.contiguous(), **more)
llm = LLM(model=given["folder"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=given["length"],
          max_num_seqs=given["slots"], generation_config="vllm", gpu_memory_utilization=given["memory"], **given["options"])
settings = [SamplingParams(n=given["group"], max_tokens=n, temperature=1.0, ignore_eos=True, detokenize=False) for _, n in given["lengths"]]
for turn in range(given["repeats"] + 1):
    rng = np.random.default_rng(turn)
    drawn = [rng.integers(100, 40000, n).tolist() for n, _ in given["lengths"]]
    began = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": p} for p in drawn], settings, use_tqdm=False)
    count = sum(len(one.token_ids) for answer in found for one in answer.outputs)
    print("TIMED " + json.dumps([count, time.perf_counter() - began]), flush=True)
"""


def config_of(model: str, layers: int) -> dict[str, Any]:
    """Returns the config.json that vLLM takes for a shape of models.sizes."""
    from jaxrl_llm.models import hf_config
    from jaxrl_llm.models.sizes import SHAPES

    shape = SHAPES[model]
    written = hf_config.write(replace(shape, layers=layers or shape.layers))
    if written["model_type"] != "qwen3_5_text":
        return written
    dense = {"num_experts": 0, "num_experts_per_tok": 0, "mlp_only_layers": [], "tie_word_embeddings": False}
    return written | dense | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}


def checked(command: Sequence[str], environment: dict[str, str]) -> list[str]:
    """Returns the lines that a command prints.

    Raises:
      RuntimeError: it fails; the message has the end of what it says.
    """
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]} failed ({done.returncode}): {done.stderr[-3000:].strip()}")
    return done.stdout.splitlines()


def flags(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags of the benchmark of the embedded sampler, which times a quarter of --repeats."""
    return {
        "work": "sample", "model": given.model, "layers": given.layers, "slots": given.slots, "group": given.group,
        "prompts": given.slots // given.group, "prompt_tokens": given.prompt, "response_tokens": given.tokens,
        "shortest": given.shortest, "shrink": given.shrink, "decode_chunk": given.chunk, "repeats": 4 * given.repeats,
    }  # fmt: skip


def lengths(given: argparse.Namespace) -> list[list[int]]:
    """Returns the tokens of each prompt and of its responses."""
    from jaxrl_llm.tools.bench_case import Case

    found: list[list[int]] = Case(flags=flags(given), repeats=1).sampled.tolist()
    return found


def by_vllm(given: argparse.Namespace) -> list[float]:
    """Returns vLLM's tokens per second of each repetition after the first."""
    config = config_of(given.model, given.layers)
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "config.json").write_text(json.dumps(config))
    hybrid = config["model_type"] == "qwen3_next"
    asked = {
        "folder": str(given.folder), "slots": given.slots, "group": given.group, "lengths": lengths(given),
        "length": given.prompt + given.tokens, "memory": given.memory, "repeats": given.repeats, "dense": hybrid,
        "options": HYBRID if hybrid else {},
    }  # fmt: skip
    path = os.pathsep.join([*given.python_path, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    environment = {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    lines = checked([given.python, "-c", VLLM, json.dumps(asked)], environment)
    timed = [json.loads(line[6:]) for line in lines if line.startswith("TIMED ")]
    return [drawn / seconds for drawn, seconds in timed[1:]]


def by_sampler(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of `bench --work=sample`."""
    command = [
        sys.executable,
        "-m",
        "jaxrl_llm.tools.bench",
        *(f"--{name}={value}" for name, value in flags(given).items()),
    ]
    lines = checked(command, {})
    row: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a shape of models.sizes")
    parser.add_argument("--layers", type=int, default=0, help="layers of it; 0 takes all")
    parser.add_argument("--folder", type=Path, required=True, help="where vLLM finds a config.json")
    parser.add_argument("--group", type=int, default=8, help="sequences of a prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a response")
    parser.add_argument("--shortest", type=int, default=0, help="fewest tokens of both, of lengths drawn at random")
    parser.add_argument("--shrink", type=int, default=0, help="the embedded sampler's")
    parser.add_argument("--chunk", type=int, default=64, help="the embedded sampler's decode_chunk")
    parser.add_argument("--slots", type=int, default=256, help="sequences at once")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions, after one that is not")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--python-path", nargs="*", default=[], help="folders with its packages")
    given = parser.parse_args()
    from jaxrl_llm.models.sizes import SHAPES

    if given.model not in SHAPES:
        parser.error(f"--model must be one of {', '.join(SHAPES)} (got {given.model})")
    rates = by_vllm(given)
    row = by_sampler(given)
    theirs = statistics.median(rates)
    found = {
        "model": given.model,
        "layers": given.layers,
        "vllm": round(theirs),
        "each": [round(rate) for rate in rates],
    }
    print(
        json.dumps(
            found
            | {"ours": round(row["generated_per_s"]), "ratio": round(row["generated_per_s"] / theirs, 3), "row": row}
        )
    )


if __name__ == "__main__":
    main()
