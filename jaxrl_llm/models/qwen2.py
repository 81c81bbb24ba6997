"""Qwen2 and Qwen2.5: biased query, key and value projections (https://arxiv.org/abs/2412.15115)."""

from dataclasses import dataclass, field

from jaxrl_llm.models.architecture import Architecture, Experts


@dataclass(frozen=True, kw_only=True)
class Qwen2(Architecture):
    """Sizes of a dense Qwen2 or Qwen2.5 model; see Architecture."""

    qkv_bias: bool = field(default=True, init=False)
    qk_norm: bool = field(default=False, init=False)
    experts: Experts | None = field(default=None, init=False)
