"""Phases of a stage: where the log-probs of a step are read from, what is minimised, and which parameters learn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from jaxrl_llm import bounds
from jaxrl_llm.protocols import Algorithm

Site = Literal["layer_in", "attn_in_normed", "attn_out", "mlp_in_normed", "mlp_out", "layer_out"]
SITES: tuple[Site, ...] = get_args(Site)

# The part of a model's parameters that is stacked over layers, [L, ...].
LAYERS = "layers"


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A hidden state inside the model, read by the head as if it were the last one: softmax(h E^T / temperature).

    Layers after it are not computed.

    Attributes:
      layer: the layer, from 0.
      site: "layer_in" and "layer_out" are the residual stream, "attn_in_normed" and "mlp_in_normed" what a module is
        given, "attn_out" and "mlp_out" what it adds to the stream.
      final_norm: apply the model's final norm before the head.
    """

    layer: int
    site: Site = "layer_out"
    final_norm: bool = False

    def __post_init__(self) -> None:
        bounds.one_of(self, SITES, "site")

    def check(self, layers: int) -> None:
        """Raises ValueError where a model of `layers` layers has no such layer."""
        if not 0 <= self.layer < layers:
            raise ValueError(f"Capture.layer must be in 0..{layers - 1}, a layer of the model (got {self.layer})")


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """Which parameters of the policy learn; the others keep values, moments and step counts bit for bit.

    Attributes:
      layers: the first layers that learn; None for all.
      frozen: other parts that do not learn: of "embedding", "norm" (the final one) and "head".
    """

    layers: int | None = None
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", tuple(self.frozen))  # a list in a gin file; hashable here
        if unknown := sorted({*self.frozen} - {"embedding", "norm", "head"}):
            raise ValueError(f"Trainable.frozen may name embedding, norm and head (got {unknown})")
        bounds.at_least(self, 0, "layers")

    def mask(self, parts: Mapping[str, object], layers: int) -> dict[str, np.ndarray]:
        """Whether each part learns: bool [], and bool [L] of the stacked layers."""
        first = layers if self.layers is None else self.layers
        known = {part: np.asarray(part not in self.frozen) for part in parts}
        return known | ({LAYERS: np.arange(layers) < first} if LAYERS in known else {})


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How the steps of a phase score and learn.

    Attributes:
      name: names the phase in metrics and checkpoints.
      view: what log-probs and entropies are read from; None is the model's own output.
      loss: the objective; None is the stage's algorithm.
      trainable: which parameters learn; None for all.
    """

    name: str
    view: Capture | None = None
    loss: Algorithm | None = None
    trainable: Trainable | None = None


# The only phase of a stage without a schedule.
WHOLE = Phase(name="whole")
