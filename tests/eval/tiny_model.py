"""A random model of a few thousand parameters as a Hugging Face folder, and rows of sums to ask it."""

import json
from pathlib import Path

import jax

from jaxrl_llm.data.tokenizer import ByteTokenizer
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3

SIZES = Qwen3(
    vocabulary_size=260, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp_width=32, max_positions=512
)


def write_model(folder: Path) -> Path:
    """The model's folder, with the byte tokenizer."""
    policy = Policy(SIZES, Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]), "float32", "none")
    hf_weights.save(policy, policy.init(jax.random.key(0)), folder, tokenizer=ByteTokenizer().load())
    return folder


def write_sums(file: Path, count: int = 6) -> Path:
    """Rows {problem, answer}; the answers alternate between text and floats that are integers."""
    rows = [{"problem": f"What is {i} + {i}?", "answer": 2.0 * i if i % 2 else str(2 * i)} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
