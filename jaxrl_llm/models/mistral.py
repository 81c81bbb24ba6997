"""Mistral and Ministral: sliding-window attention in all layers, or in some of them (https://arxiv.org/abs/2310.06825)."""

from dataclasses import dataclass, field

from jaxrl_llm.models.architecture import Architecture, Experts


@dataclass(frozen=True, kw_only=True)
class Mistral(Architecture):
    """Sizes of a Mistral or Ministral model; see Architecture."""

    rope_theta: float = 1e4
    norm_epsilon: float = 1e-5
    qkv_bias: bool = field(default=False, init=False)
    qk_norm: bool = field(default=False, init=False)
    experts: Experts | None = field(default=None, init=False)
