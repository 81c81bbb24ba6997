"""Qwen3.5, dense and text alone: three of four layers hold a recurrent state, and every fourth attends with gated heads."""

from dataclasses import dataclass, field

from jaxrl_llm.models.architecture import Architecture, Experts, GatedDelta, Llama3RopeScaling


@dataclass(frozen=True, kw_only=True)
class Qwen3_5(Architecture):
    """Sizes of a dense Qwen3.5 model; see Architecture."""

    delta: GatedDelta
    rope_theta: float = 1e7
    rotary_share: float = 0.25
    rope_scaling: Llama3RopeScaling | None = field(default=None, init=False)
    qkv_bias: bool = field(default=False, init=False)
    qk_norm: bool = field(default=True, init=False)
    window: int | None = field(default=None, init=False)
    sliding: tuple[bool, ...] = field(default=(True,), init=False)
    experts: Experts | None = field(default=None, init=False)
    output_gate: bool = field(default=True, init=False)
    zero_centred: bool = field(default=True, init=False)
