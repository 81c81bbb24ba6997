"""Architecture of a decoder-only transformer: its sizes and switches, and the sites inside it that can be read."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from jaxrl_llm import components

# The part of a model's parameters that is stacked over layers, [L, ...]; where kinds of layers take turns there are several,
# "layers_0", "layers_1" and so on (`Architecture.stacks`).
LAYERS = "layers"
# Parameters that stay in float32 where others are rounded to a model's compute dtype.
PRECISE = ("scale", "router", "choice_bias", "log_decay", "rate_bias")

MOST_EXPERTS = 2**16 - 1


def stack_of(part: str) -> int | None:
    """Returns the number of the stack of layers that a part of the parameters is, or None for another part."""
    if part == LAYERS:
        return 0
    head, _, number = part.rpartition("_")
    return int(number) if head == LAYERS and number.isdigit() else None


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Rotary frequencies of Llama 3.1 and later: long wavelengths are stretched, short ones kept, the rest interpolated.

    Attributes:
      factor: factor by which the longest wavelengths are stretched.
      low_frequency_factor: wavelengths above original_max_positions / this are stretched in full.
      high_frequency_factor: wavelengths below original_max_positions / this are kept.
      original_max_positions: context length in tokens before the stretch.
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        components.above(self, self.low_frequency_factor, "high_frequency_factor")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of an MLP layer: a router sends each token to some of them, and their outputs are added by its weights.

    Attributes:
      count: number of experts of a layer.
      chosen: number of experts to which a token is routed.
      width: width of one expert's gated MLP.
      normalised: whether the weights of the chosen experts are divided by their sum, so that they add up to 1.
      layers: which layers have experts, while the others have a dense MLP; the pattern repeats over the depth.
      shared: width of one more expert, to which every token goes and whose output is multiplied by the sigmoid of a gate of its own, or None.
      choice_bias: whether each expert has a number that is added to its probability where experts are chosen, and nowhere else; it is 0
        at the start, no gradient reaches it, and train.Router.bias_rate moves it.
    """

    count: int
    chosen: int
    width: int
    normalised: bool = False
    layers: tuple[bool, ...] = (True,)
    shared: int | None = None
    choice_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # gin files give a list; a tuple is hashable
        components.at_least(self, 1, "count", "chosen", "width", "shared")
        components.within(self, f"[1, {self.count}]", "chosen")
        if self.count > MOST_EXPERTS:
            components.refuse(self, "count", f"<= {MOST_EXPERTS}, since a recorded choice has 16 bits")
        if not any(self.layers):
            raise ValueError(
                f"Experts.layers must name a layer with experts (got {self.layers}): (True,) gives all layers experts, "
                "(False, True) every second; for none leave the architecture's `experts` out"
            )

    @property
    def unrecorded(self) -> int:
        """The number that stands for an expert in a record where none was recorded: the largest of the record's dtype."""
        return 255 if self.count <= 255 else MOST_EXPERTS

    @property
    def record_dtype(self) -> str:
        """The dtype of recorded choices of experts."""
        return "uint8" if self.count <= 255 else "uint16"


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Layers that hold a recurrent state, by the gated delta rule, in place of attention (kernels/delta_rule).

    Attributes:
      key_heads: number of query and key heads.
      value_heads: number of value heads, each with a state; a multiple of `key_heads`.
      key_width: width of a query and key head.
      value_width: width of a value head.
      taps: number of tokens that the convolution before the recurrence sees, its own included.
      layers: which layers are of this kind, while the others attend; the pattern repeats over the depth.
    """

    key_heads: int
    value_heads: int
    key_width: int = 128
    value_width: int = 128
    taps: int = 4
    layers: tuple[bool, ...] = (True, True, True, False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # gin files give a list; a tuple is hashable
        components.at_least(self, 1, "key_heads", "value_heads", "key_width", "value_width")
        components.at_least(self, 2, "taps")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"GatedDelta.key_heads must divide GatedDelta.value_heads (got {self.key_heads} and {self.value_heads})"
            )
        if not any(self.layers):
            raise ValueError(
                f"GatedDelta.layers must name a layer with a state (got {self.layers}): (True, True, True, False) gives three of four one"
            )

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the state of one sequence and layer."""
        return self.value_heads, self.key_width, self.value_width


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated SiLU MLP; each family fixes the switches.

    Attributes:
      vocabulary_size: number of rows of the embedding.
      width: width of the residual stream.
      layers: number of layers.
      heads: number of query heads.
      kv_heads: number of key/value heads; divides `heads`.
      head_width: width of one head.
      mlp_width: width of the MLP.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: stretch of the rotary wavelengths, or None.
      norm_epsilon: constant added to the mean square in every RMSNorm.
      tied: whether the head is the embedding.
      qkv_bias: whether the query, key and value projections have a bias.
      qk_norm: whether queries and keys are RMS-normalised over the head width before the rotation.
      window: number of tokens that a sliding layer sees, including the query's own; None lets every layer see all.
      sliding: which layers slide where `window` is set; the pattern repeats over the depth.
      max_positions: longest sequence in tokens.
      init_std: standard deviation of random weights.
      experts: the experts of the layers that have them in place of a dense MLP, or None.
      delta: the layers that hold a recurrent state in place of attention, or None.
      rotary_share: share of a head's width that is rotated, from its first dimension on.
      output_gate: whether the heads' outputs are multiplied by the sigmoid of a gate, which the query projection computes beside each query.
      zero_centred: whether the scale of an RMSNorm is kept as its difference from 1.
      joined: whether the four projections into a layer with a state are stored as two, by key head.
    """

    vocabulary_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    rope_theta: float = 1e6
    rope_scaling: Llama3RopeScaling | None = None
    norm_epsilon: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    sliding: tuple[bool, ...] = (True,)
    max_positions: int = 32768
    init_std: float = 0.02
    experts: Experts | None = None
    delta: GatedDelta | None = field(default=None, init=False)
    rotary_share: float = field(default=1.0, init=False)
    output_gate: bool = field(default=False, init=False)
    zero_centred: bool = field(default=False, init=False)
    joined: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        name = type(self).__name__
        sizes = "vocabulary_size width layers heads kv_heads head_width mlp_width max_positions"
        components.at_least(self, 1, *sizes.split())
        if self.heads % self.kv_heads:
            raise ValueError(f"{name}.kv_heads must divide {name}.heads (got {self.kv_heads} and {self.heads})")
        if self.head_width % 2:
            raise ValueError(f"{name}.head_width must be even for the rotary halves (got {self.head_width})")
        components.within(self, "(0, 1]", "rotary_share")
        if self.rotated % 2 or not self.rotated:
            raise ValueError(
                f"{name}.rotary_share of head_width must be an even number of dimensions (got {self.rotary_share} of {self.head_width})"
            )
        components.at_least(self, 1, "window")
        if not self.sliding:
            raise ValueError(f"{name}.sliding must not be empty: (True,) slides all layers, (False, True) every second")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer that sees all tokens."""
        return tuple(self.window if self.sliding[i % len(self.sliding)] else None for i in range(self.layers))

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        pattern = (False,) if self.experts is None else self.experts.layers
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    @property
    def rotated(self) -> int:
        """The number of dimensions of a head that are rotated."""
        return int(self.head_width * self.rotary_share)

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """Whether each layer holds a recurrent state; the others attend."""
        pattern = (False,) if self.delta is None else self.delta.layers
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    @property
    def period(self) -> int:
        """The number of layers after which their kinds repeat, a divisor of `layers`; parameters of layers so far apart are stacked."""
        kinds = tuple(zip(self.sparse, self.recurrent))
        divisors = (p for p in range(1, self.layers + 1) if self.layers % p == 0)
        return next(p for p in divisors if all(kind == kinds[i % p] for i, kind in enumerate(kinds)))

    @property
    def stacks(self) -> tuple[str, ...]:
        """The parts of the parameters that are stacked over layers: layer i is number i // period of stack i % period."""
        return (LAYERS,) if self.period == 1 else tuple(f"{LAYERS}_{i}" for i in range(self.period))


Site = Literal["layer_in", "attn_in_normed", "attn_out", "mlp_in_normed", "mlp_out", "layer_out"]
SITES: tuple[Site, ...] = get_args(Site)


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A hidden state inside the model that the head reads as if it were the last one: softmax(h E^T / temperature).

    Later layers are not computed.

    Attributes:
      layer: the layer, counted from 0.
      site: "layer_in" and "layer_out" are the residual stream, "attn_in_normed" and "mlp_in_normed" the input of a module,
        "attn_out" and "mlp_out" what a module adds to the stream.
      final_norm: whether the model's final norm is applied before the head.
    """

    layer: int
    site: Site = "layer_out"
    final_norm: bool = False

    def __post_init__(self) -> None:
        components.choices(self)

    def check(self, layers: int) -> None:
        """Raises ValueError where a model of `layers` layers does not have this layer."""
        if not 0 <= self.layer < layers:
            raise ValueError(f"Capture.layer must be in 0..{layers - 1}, a layer of the model (got {self.layer})")
