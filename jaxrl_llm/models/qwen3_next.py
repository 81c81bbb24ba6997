"""Qwen3-Next: the layers of Qwen3.5, with experts and a shared one in place of the MLP of all layers or of some."""

from dataclasses import dataclass, field

from jaxrl_llm.models.architecture import Experts
from jaxrl_llm.models.qwen3_5 import Hybrid


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Hybrid):
    """Sizes of a Qwen3-Next model; see Architecture. `mlp_width` is that of the dense layers among the ones with experts."""

    experts: Experts
    joined: bool = field(default=True, init=False)
