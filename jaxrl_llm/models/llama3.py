"""Llama 3.x, and older models of its shape such as SmolLM2: no biases, stretched rotary wavelengths from 3.1 on.

https://arxiv.org/abs/2407.21783
"""

from dataclasses import dataclass, field

from jaxrl_llm.models.architecture import Architecture, Experts


@dataclass(frozen=True, kw_only=True)
class Llama3(Architecture):
    """Sizes of a Llama model; see Architecture."""

    rope_theta: float = 5e5
    norm_epsilon: float = 1e-5
    qkv_bias: bool = field(default=False, init=False)
    qk_norm: bool = field(default=False, init=False)
    window: int | None = field(default=None, init=False)
    sliding: tuple[bool, ...] = field(default=(True,), init=False)
    experts: Experts | None = field(default=None, init=False)
