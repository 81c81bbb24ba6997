"""Shapes of the experts of real models at which grouped_matmul is benchmarked."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The shape of one layer of experts.

    Attributes:
      tokens: number of rows of the layer's input.
      experts: number of experts, E.
      chosen: number of experts of a token, k.
      width: width of the tokens, D.
      inner: width of an expert, M.
    """

    tokens: int
    experts: int
    chosen: int
    width: int
    inner: int


SPECS = {
    "quickstart": Spec(tokens=2048, experts=8, chosen=2, width=128, inner=128),
    "qwen3-30b-a3b": Spec(tokens=32768, experts=128, chosen=8, width=2048, inner=768),
    "qwen3-30b-a3b-decode": Spec(tokens=1024, experts=128, chosen=8, width=2048, inner=768),
    "qwen3-235b-a22b": Spec(tokens=8192, experts=128, chosen=8, width=4096, inner=1536),
    "qwen3.5-35b-a3b": Spec(tokens=32768, experts=256, chosen=8, width=2048, inner=512),
}
