"""Sizes of well-known models by name, for benchmarks with random weights."""

from jaxrl_llm.models.architecture import Architecture, Experts, GatedDelta
from jaxrl_llm.models.llama3 import Llama3
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.qwen3_5 import Qwen3_5
from jaxrl_llm.models.qwen3_moe import Qwen3MoE

SHAPES: dict[str, Architecture] = {
    "tiny": Qwen3(vocabulary_size=512, width=64, layers=2, heads=4, kv_heads=2, head_width=16, mlp_width=128),
    "qwen2.5-0.5b": Qwen2(
        vocabulary_size=151936, width=896, layers=24, heads=14, kv_heads=2, head_width=64, mlp_width=4864, tied=True
    ),
    "qwen2.5-1.5b": Qwen2(
        vocabulary_size=151936, width=1536, layers=28, heads=12, kv_heads=2, head_width=128, mlp_width=8960, tied=True
    ),
    "qwen2.5-3b": Qwen2(
        vocabulary_size=151936, width=2048, layers=36, heads=16, kv_heads=2, head_width=128, mlp_width=11008, tied=True
    ),
    "qwen2.5-7b": Qwen2(
        vocabulary_size=152064, width=3584, layers=28, heads=28, kv_heads=4, head_width=128, mlp_width=18944
    ),
    "qwen2.5-14b": Qwen2(
        vocabulary_size=152064, width=5120, layers=48, heads=40, kv_heads=8, head_width=128, mlp_width=13824
    ),
    "qwen2.5-72b": Qwen2(
        vocabulary_size=152064, width=8192, layers=80, heads=64, kv_heads=8, head_width=128, mlp_width=29568
    ),
    "qwen3-8b": Qwen3(
        vocabulary_size=151936, width=4096, layers=36, heads=32, kv_heads=8, head_width=128, mlp_width=12288
    ),
    "qwen3-32b": Qwen3(
        vocabulary_size=151936, width=5120, layers=64, heads=64, kv_heads=8, head_width=128, mlp_width=25600
    ),
    "qwen3-30b-a3b": Qwen3MoE(
        vocabulary_size=151936,
        width=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_width=128,
        mlp_width=6144,
        max_positions=40960,
        experts=Experts(count=128, chosen=8, width=768, normalised=True),
    ),
    "llama3-70b": Llama3(
        vocabulary_size=128256, width=8192, layers=80, heads=64, kv_heads=8, head_width=128, mlp_width=28672
    ),
    "qwen3.5-0.8b": Qwen3_5(
        vocabulary_size=248320, width=1024, layers=24, heads=8, kv_heads=2, head_width=256, mlp_width=3584, tied=True,
        max_positions=262144, delta=GatedDelta(key_heads=16, value_heads=16),
    ),
    "qwen3.5-2b": Qwen3_5(
        vocabulary_size=248320, width=2048, layers=24, heads=8, kv_heads=2, head_width=256, mlp_width=6144, tied=True,
        max_positions=262144, delta=GatedDelta(key_heads=16, value_heads=16),
    ),
}  # fmt: skip
