"""A server's engine on two tensor-parallel ranks, or as ENGINE (JSON) says, run as a program: prints what it computes as JSON.

python two_ranks.py MODEL PATH ... [VERSIONS, TOKENS]

Each path is staged and committed in turn, as the version of that place in VERSIONS.
"""

import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

EXTENSION = "jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension"


def main() -> None:
    model, *paths, asked = sys.argv[1:]
    versions, tokens = json.loads(asked)
    settings = {"tensor_parallel_size": 2} | json.loads(os.environ.get("ENGINE", "{}"))
    llm = LLM(
        model, **settings, dtype="float32", enforce_eager=True, load_format="dummy", max_model_len=512,
        max_num_seqs=4, kv_cache_memory_bytes=1 << 25, worker_extension_cls=EXTENSION, enable_prefix_caching=False,
    )  # fmt: skip
    found: dict[str, Any] = {"logprobs": [], "statuses": [], "commits": []}
    for version, path in zip(versions, paths, strict=True):
        llm.collective_rpc("stage", args=(path, str(version)))
        while any(status["state"] == "staging" for status in llm.collective_rpc("stage_status")):
            time.sleep(0.01)
        found["statuses"].append(llm.collective_rpc("stage_status"))
        found["commits"].append(llm.collective_rpc("commit", args=(str(version),)))
        found["logprobs"].append(scored(llm, tokens))
    found["after"] = llm.collective_rpc("stage_status")
    found["published"] = llm.collective_rpc("published_version")
    print("FOUND " + json.dumps(found), flush=True)


def scored(llm: LLM, tokens: list[int]) -> list[float]:
    (output,) = llm.generate(
        {"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    return [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]


if __name__ == "__main__":
    main()
