"""Qwen3-MoE: the attention of Qwen3, and experts in place of the MLP of all layers or of some (https://arxiv.org/abs/2505.09388)."""

from dataclasses import dataclass, field

from jaxrl_llm.models.architecture import Architecture, Experts


@dataclass(frozen=True, kw_only=True)
class Qwen3MoE(Architecture):
    """Sizes of a Qwen3-MoE model; see Architecture. `mlp_width` is that of the dense layers among the ones with experts."""

    experts: Experts
    qkv_bias: bool = field(default=False, init=False)
    qk_norm: bool = field(default=True, init=False)
    window: int | None = field(default=None, init=False)
    sliding: tuple[bool, ...] = field(default=(True,), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts.shared is not None:
            raise ValueError(
                f"Experts.shared must be None in a Qwen3MoE, which has no shared expert (got {self.experts.shared})"
            )
