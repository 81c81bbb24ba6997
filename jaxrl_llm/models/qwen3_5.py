"""Qwen3.5, text alone: three of four layers hold a recurrent state, and every fourth attends with gated heads; dense or with experts."""

from dataclasses import dataclass, field

from jaxrl_llm.models.architecture import Architecture, Experts, GatedDelta, Llama3RopeScaling


@dataclass(frozen=True, kw_only=True)
class Hybrid(Architecture):
    """The base class of models whose layers hold a recurrent state; see Architecture."""

    delta: GatedDelta
    rope_theta: float = 1e7
    rotary_share: float = 0.25
    rope_scaling: Llama3RopeScaling | None = field(default=None, init=False)
    qkv_bias: bool = field(default=False, init=False)
    qk_norm: bool = field(default=True, init=False)
    window: int | None = field(default=None, init=False)
    sliding: tuple[bool, ...] = field(default=(True,), init=False)
    output_gate: bool = field(default=True, init=False)
    zero_centred: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts is not None and self.experts.shared is None:
            raise ValueError(
                f"Experts.shared must be a width in a {type(self).__name__}, whose layers with experts have a shared one (got None)"
            )


@dataclass(frozen=True, kw_only=True)
class Qwen3_5(Hybrid):
    """Sizes of a dense Qwen3.5 model; see Architecture."""

    experts: Experts | None = field(default=None, init=False)


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoE(Hybrid):
    """Sizes of a Qwen3.5 model with experts in every layer; see Architecture. No layer has an MLP of `mlp_width`."""

    experts: Experts

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.experts.normalised and all(self.sparse)):
            raise ValueError(
                "Experts.normalised must be True and Experts.layers (True,) in a Qwen3_5MoE, which has no other form "
                f"(got {self.experts.normalised} and {self.experts.layers})"
            )
