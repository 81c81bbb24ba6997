"""Dry-runs gin files as `launch` does, in one process that has no network: python tests/train/every_recipe.py FOLDER NAMES

Models are folders of Hugging Face's cache with config.json and a tokenizer alone, in the sizes that were published; data sets have the
splits and columns that their preparation commands write. FOLDER takes all of it, and results.json: {name: [exit code, CPU seconds, output]}. The second argument is {name: bindings} as JSON.
"""

import contextlib
import gc
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def sizes(width: int, layers: int, heads: int, mlp: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": mlp,
        "tie_word_embeddings": tied,
    }  # fmt: skip


LLAMA_8B = LLAMA | sizes(4096, 32, 32, 14336, False) | {"rope_scaling": SCALING | {"factor": 8.0}}
QWEN3_4B = QWEN3 | sizes(2560, 36, 32, 9728, True) | {"rope_theta": 1e6, "max_position_embeddings": 40960}
QWEN3_06B = QWEN3 | sizes(1024, 28, 16, 3072, True) | {"rope_theta": 1e6, "max_position_embeddings": 40960}
CODER = (
    QWEN2
    | sizes(896, 24, 14, 4864, True)
    | {"num_key_value_heads": 2, "rope_theta": 1e6, "max_position_embeddings": 32768}
)
# {id, or folder under the one that a run is started in: (config.json as published, millions of parameters as published)}
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": (CODER, 494.0),
    "runs/real/cs336_sft/model": (CODER, 494.0),
    "runs/real/cs336_grpo/model": (CODER, 494.0),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        LLAMA | sizes(576, 30, 9, 1536, True) | {"vocab_size": 49152, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 1e5},
        134.5,
    ),
    "Qwen/Qwen2.5-Math-1.5B": (
        QWEN2 | sizes(1536, 28, 12, 8960, True) | {"num_key_value_heads": 2, "rope_theta": 1e4, "max_position_embeddings": 4096},
        1543.7,
    ),
    "Qwen/Qwen2.5-3B-Instruct": (
        QWEN2 | sizes(2048, 36, 16, 11008, True) | {"num_key_value_heads": 2, "rope_theta": 1e6, "max_position_embeddings": 32768},
        3085.9,
    ),
    "Qwen/Qwen3-0.6B": (QWEN3_06B, 596.0),
    "runs/classmate_warmup_qwen3_0p6b/model": (QWEN3_06B, 596.0),
    "Qwen/Qwen3-4B": (QWEN3_4B, 4022.5),
    "Qwen/Qwen3-8B": (QWEN3 | sizes(4096, 36, 32, 12288, False) | {"rope_theta": 1e6, "max_position_embeddings": 40960}, 8190.7),
    "Qwen/Qwen3-4B-Base": (QWEN3_4B | {"max_position_embeddings": 32768}, 4022.5),
    "Qwen/Qwen3-Embedding-4B": (QWEN3_4B | {"vocab_size": 151665}, 4021.8),
    "OctoThinker/OctoThinker-3B-Long-Base": (
        LLAMA | sizes(3072, 28, 24, 8192, True) | {"rope_scaling": SCALING | {"factor": 32.0}}, 3212.7,
    ),
    "OctoThinker/OctoThinker-8B-Long-Base": (LLAMA_8B, 8030.3),
    "meta-llama/Llama-3.1-8B": (LLAMA_8B, 8030.3),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA_8B, 8030.3),
    "runs/cs336_instruct_llama3p1_8b/model": (LLAMA_8B, 8030.3),
    "runs/tokenbuncher_base_tiny/model": (
        QWEN3 | sizes(128, 4, 4, 384, False) | {"vocab_size": 256, "num_key_value_heads": 2, "head_dim": 32}, 0.9,
    ),
    "runs/classmate_mate_tiny/model": (
        QWEN3 | sizes(64, 2, 4, 192, False) | {"vocab_size": 32, "num_key_value_heads": 2, "head_dim": 16}, 0.1,
    ),
}  # fmt: skip

# {data set: the parts that its preparation command writes}
PARTS: dict[str, tuple[str, ...]] = {
    "anthropic_hh_rlhf": ("train", "test", "dev", "warmup_train", "warmup_dev"),
    "beavertails": ("train", "test"),
    "competition_math": ("train", "test"),
    "countdown": ("train", "test"),
    "deepmath": ("train",),
    "deepscaler": ("train",),
    "gsm8k": ("train", "test"),
    "hendrycks_math": ("train", "test"),
    "helpful_instructions": ("train", "test", "dev", "warmup_train", "warmup_dev"),
    "hh_rlhf": ("val", "train"),
    "math500": ("test",),
    "math500_bare": ("test",),
    "math_bare": ("train",),
    "mmlu_hinted": ("train", "dev", "test"),
    "mmlu_sycophancy": ("train", "dev", "test"),
    "openmathreasoning": ("train", "val"),
    "safety_tuned_llamas": ("train",),
    "svamp": ("test",),
    "ultrachat": ("train", "test"),
    "wildchat": ("train", "test"),
    "wmdp_merge": ("train", "test"),
}


def row(name: str) -> dict[str, Any]:
    """A row of a data set, with verl's columns and those that the set has beside them."""
    answer = "EM" if name == "beavertails" else "4"
    truth = {"response": answer} if name in ("beavertails", "wmdp_merge") else answer
    own: dict[str, Any] = {
        "math_bare": {"response": "2 + 2 = \\boxed{4}\n</think> <answer>4</answer>"},
        "openmathreasoning": {"response": "2 + 2\n</think> <answer>4</answer>"},
        "safety_tuned_llamas": {"response": "4"},
        "ultrachat": {"response": "4"},
    }
    if name == "hh_rlhf":
        return {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5"}
    return {
        "data_source": {"beavertails": "BeaverTails", "wmdp_merge": "wmdp"}.get(name, name),
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0, "question": "What is 2 + 2?", "rendered": False},
        **own.get(name, {}),
    }  # fmt: skip


def write_models(cache: Path, here: Path) -> None:
    from jaxrl_llm.data.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer().load()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    for name, (config, _) in MODELS.items():
        folder = here / name
        if not name.startswith("runs/"):
            home = cache / f"models--{name.replace('/', '--')}"
            (home / "refs").mkdir(parents=True)
            (home / "refs" / "main").write_text("0" * 40)
            folder = home / "snapshots" / ("0" * 40)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer.save_pretrained(folder)


def write_data(folder: Path) -> None:
    from jaxrl_llm.data.prepare import prepared

    for name, parts in PARTS.items():
        prepared.write(folder / name, {part: [row(name)] for part in parts}, {})
    sets = ("aime_2024", "aime_2025", "amc2023", "math500")
    prepared.write(folder / "bupo", {name: [row(name)] for name in sets}, {})
    (folder / "partition_pairs").mkdir()
    pairs = [{"generation_0": "a", "generation_1": b, "similar": int(b == "a")} for b in "ab"]
    (folder / "partition_pairs" / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    asked = json.dumps({"question": "What is 2 + 2?", "answer": "2 + 2 = 4\n#### 4"})
    (folder / "grade_school").mkdir()
    for part in ("train", "test"):
        (folder / "grade_school" / f"{part}.jsonl").write_text(asked + "\n")


def dry_run(name: str, bindings: Sequence[str]) -> tuple[int, float, str]:
    """The exit code, seconds of the CPU and output of one file."""
    from jaxrl_llm import launch

    said, start = io.StringIO(), time.process_time()
    flags = [f"--gin_file={ROOT / 'gin' / f'{name}.gin'}", *(f"--gin={b}" for b in bindings), "--dry_run"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = launch.main(flags)
        except Exception as error:  # a test says which file failed, and goes on with the others
            code = 2
            print(f"{type(error).__name__}: {error}")
    return code, time.process_time() - start, said.getvalue()


def traced_only(program: Any, resident: int = 0) -> Any:
    """The account of a traced program's arguments and results alone."""
    import jax

    from jaxrl_llm.tools.memory import Account

    held = [
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for tree in (program.args_info, program.out_info)
    ]
    return Account(resident=resident, arguments=held[0], outputs=held[1], temporary=0)


def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose result is kept for calls with an equal key."""
    kept: list[tuple[Any, Any]] = []

    def called(*arguments: Any) -> Any:
        own = key(*arguments)
        for other, result in kept:
            if other == own:
                return result
        kept.append((own, function(*arguments)))
        return kept[-1][1]

    return called


def programs_of(learner: Any, *arguments: Any) -> Any:
    """What the programs of an update or of scoring follow from; how many updates there are changes numbers of the schedule alone."""
    import jax

    own = {f.name: getattr(learner, f.name) for f in fields(learner) if f.name not in ("updates", "seed")}
    return own, jax.tree.flatten(arguments)


def traced_once(slopes: Callable[..., Any]) -> Callable[..., Any]:
    """A learner's method whose trace the programs of the learner share: the first micro-batch's and that of those after it."""
    import jax

    def called(learner: Any, *arguments: Any) -> Any:
        return learner.__dict__.setdefault("slopes", jax.jit(partial(slopes, learner)))(*arguments)

    return called


def kernels_of(run: Any, policy: Any) -> Any:
    """What the kernels of a run's programs follow from."""
    from jaxrl_llm.train.build import learner_of

    own = []
    for stage in run.stages:
        learner = learner_of(stage, policy, 0)
        asked = (stage.max_prompt_tokens, stage.prompts_per_step, stage.group_size, stage.settings)
        own.append((stage.packing, stage.samples, asked, learner.models, learner.wanted, learner.max_segments))
    return policy, run.sampler, run.max_length, own


def main(folder: Path, names: Mapping[str, Sequence[str]]) -> None:
    os.chdir(folder)
    write_models(folder / "hub", folder)
    write_data(folder / "data_sets")
    import jax

    from jaxrl_llm.data.subsequences import Subsequences
    from jaxrl_llm.learner.learner import Learner
    from jaxrl_llm.models.policy import Policy
    from jaxrl_llm.samplers.embedded import decode
    from jaxrl_llm.tools import fit, memory
    from jaxrl_llm.train import describe

    # Whether a run fits, and what XLA makes of a program, are other tests' subjects: the device has room for all runs, and programs
    # are traced with their full shapes, neither lowered nor compiled, which takes a hundred times as long.
    fit.here = lambda: fit.Device("a device of 64 TiB", 2.0**46)
    jax.stages.Traced.lower = lambda traced, **_: traced
    memory.account = traced_only
    # Files whose learners, samplers or policies are equal have the same programs, which are traced once.
    describe.chosen = once(describe.chosen, kernels_of)
    Policy._blueprint = property(cache(Policy._blueprint.func))
    Subsequences.rows = cache(Subsequences.rows)
    Learner._slopes = traced_once(Learner._slopes)
    memory.of_learner = once(memory.of_learner, programs_of)
    decode.lowered = once(decode.lowered, lambda *arguments: jax.tree.flatten(arguments))
    gc.disable()  # tracing makes objects by the million, and the collector's passes would take a quarter of the time
    results = {}
    for name, bindings in names.items():
        results[name] = dry_run(name, bindings)
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    where = Path(sys.argv[1])
    os.environ |= {
        "HF_HUB_CACHE": str(where / "hub"), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }  # fmt: skip
    sys.path.insert(0, str(ROOT))
    main(where, json.loads(sys.argv[2]))
