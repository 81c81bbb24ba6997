"""Times rollouts through our client against vLLM's own offline generation: the same prompts, model, lengths and log-probs.

    PYTHONPATH=. python tests/real_vllm/time_sampling.py --model FOLDER --folder /dev/shm/sampling

Run it where JAX is (it computes on the CPU and leaves the GPU to vLLM). `--python` names the interpreter that has vLLM, where that is
another one, and `--python-path` a folder with its packages. Every sequence has exactly `--tokens` tokens. Prints tokens a second of each
repetition, the medians and their quotient.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

OFFLINE = """
import json, sys, time
from vllm import LLM, SamplingParams
given = json.loads(sys.argv[1])
llm = LLM(model=given["model"], dtype="bfloat16", max_model_len=given["length"], max_num_seqs=1024, generation_config="vllm",
          gpu_memory_utilization=given["memory"], logprobs_mode="processed_logprobs", hf_overrides={"head_dtype": "float32"}, **given["options"])
settings = SamplingParams(n=given["n"], max_tokens=given["tokens"], temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
for turn in range(given["repeats"] + 1):
    began = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": p} for p in given["prompts"]], settings, use_tqdm=False)
    drawn = sum(len(one.token_ids) for answer in found for one in answer.outputs)
    print("TIMED " + json.dumps([drawn, time.perf_counter() - began]), flush=True)
"""
OFFLINE_MAIN = f"if __name__ == '__main__':\n    exec({OFFLINE!r})\n"


def rates(timed: list[tuple[int, float]]) -> list[float]:
    """Tokens a second, without the first repetition."""
    return [drawn / seconds for drawn, seconds in timed[1:]]


def offline(given: argparse.Namespace, prompts: list[list[int]]) -> list[float]:
    """What vLLM's LLM.generate gives, tokens a second."""
    asked = {
        "model": str(given.model), "length": given.prompt + given.tokens, "memory": given.memory, "n": given.n,
        "tokens": given.tokens, "repeats": given.repeats, "prompts": prompts, "options": json.loads(given.options),
    }  # fmt: skip
    path = os.pathsep.join([*given.python_path, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    script = given.folder / "offline.py"
    script.write_text(OFFLINE_MAIN)
    done = subprocess.run(
        [given.python, str(script), json.dumps(asked)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )  # fmt: skip
    timed = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("TIMED ")]
    if done.returncode or len(timed) != given.repeats + 1:
        sys.exit(f"offline generation failed ({done.returncode}): {done.stderr[-3000:]}")
    return rates(timed)


async def served(given: argparse.Namespace, prompts: list[list[int]]) -> list[float]:
    """What the client gives, tokens a second."""
    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.experience import SamplingParams
    from jaxrl_llm.samplers.vllm.local_server import LocalServers
    from jaxrl_llm.samplers.vllm.sampler import VllmSampler
    from jaxrl_llm.train.load import TrainedModel

    opened = TrainedModel(path=str(given.model)).open(Partitioner.create(MeshConfig()))
    arguments = [x for name, value in json.loads(given.options).items() for x in _argument(name, value)]
    local = LocalServers(
        count=given.servers, python=given.python, python_path=given.python_path, memory_share=given.memory,
        arguments=["--max-num-seqs", "1024", *arguments],
    )  # fmt: skip
    sampler = VllmSampler(
        local=local, publication=str(given.folder), inflight="abort_resume", canary="", seeded=False,
    )  # fmt: skip
    client = sampler.start(
        opened.policy, opened.tokenizer, max_length=given.prompt + given.tokens, run_dir=given.folder
    )
    settings = SamplingParams(max_tokens=given.tokens)  # no token ends a response
    prefixes = [np.asarray(p, np.int32) for p in prompts]
    timed = []
    try:
        await client.publish(opened.params(), 0)
        for turn in range(given.repeats + 1):
            began, drawn = time.perf_counter(), 0
            async for _, group in client.sample(prefixes, given.n, settings, list(range(len(prefixes)))):
                drawn += sum(len(completion.tokens) for completion in group)
            timed.append((drawn, time.perf_counter() - began))
            print(f"  client, {turn}: {drawn} tokens in {timed[-1][1]:.2f} s", flush=True)
    finally:
        await client.close()
    return rates(timed)


def _argument(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument(
        "--folder", type=Path, required=True, help="where weights are published, such as /dev/shm/sampling"
    )
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--n", type=int, default=8, help="sequences a prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions, after one that is not")
    parser.add_argument("--vocabulary", type=int, default=40000, help="ids of the prompts' tokens lie below it")
    parser.add_argument("--servers", type=int, default=1, help="servers that the client asks")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU's memory of a server, and offline")
    parser.add_argument("--options", default="{}", help="further engine options of both, as JSON")
    parser.add_argument("--only", choices=["client", "offline"], help="one of the two")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--python-path", nargs="*", default=[], help="folders with its packages")
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    given.folder.mkdir(parents=True, exist_ok=True)
    prompts = np.random.default_rng(0).integers(100, given.vocabulary, (given.prompts, given.prompt)).tolist()
    found = {}
    if given.only != "offline":
        found["client"] = asyncio.run(served(given, prompts))
    if given.only != "client":
        found["offline"] = offline(given, prompts)
    for name, each in found.items():
        print(f"{name}: {statistics.median(each):,.0f} tokens/s (of {[round(rate) for rate in each]})")
    if len(found) == 2:
        print(f"client / offline: {statistics.median(found['client']) / statistics.median(found['offline']):.3f}")


if __name__ == "__main__":
    main()
