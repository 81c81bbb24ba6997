"""Qwen3: RMS-normalised queries and keys, no biases (https://arxiv.org/abs/2505.09388)."""

from dataclasses import dataclass, field

from jaxrl_llm.models.architecture import Architecture, Experts


@dataclass(frozen=True, kw_only=True)
class Qwen3(Architecture):
    """Sizes of a dense Qwen3 model; see Architecture."""

    qkv_bias: bool = field(default=False, init=False)
    qk_norm: bool = field(default=True, init=False)
    experts: Experts | None = field(default=None, init=False)
