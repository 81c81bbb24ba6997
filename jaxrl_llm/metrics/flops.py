"""Counts model FLOPs of a forward pass and of an update, and MFU, their share of the devices' peak.

The counting convention, which makes figures of different systems comparable:

- A matrix product of [m, k] and [k, n] counts 2 m k n. Only matrix products count: norms, softmaxes and elementwise work do not.
- These products count: the projections of attention, the MLP, in layers with experts the router and a token's experts, the scores and
weighted values of attention at the real head
  width (heads x head_width may differ from the width), and the vocabulary head. The embedding is a lookup and counts nothing.
- Causal attention counts half of the square: n tokens make n^2 / 2 pairs of query and key, and under a window of w
  tokens n w - w^2 / 2. In packed rows each sequence counts by its own length; padding counts nothing.
- In a layer with a recurrent state in place of attention, its projections count, and the products of its chunked form: in chunks of
  c = 64 tokens, 6 dk dv + 4 c (dk + dv) for a token and value head. Its convolution does not count.
- An update counts as three forward passes: the backward pass computes the gradients of the input and of the weight of each product.
  Recomputation by rematerialisation or a fused loss does not count (MFU, not hardware utilisation).
- MFU divides by the dense bfloat16 peak of the devices, 989 TFLOP/s for H100 (SXM) and H200.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

# Dense bfloat16 FLOP/s by the start of a device's `device_kind`, from the vendors' data sheets; longer names come first.
PEAKS: dict[str, float] = {
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}

# Bytes per second of a device's memory, from the same data sheets; for the A100, of the 80 GB version, whose memory is faster.
BANDWIDTHS: dict[str, float] = {
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H100": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA A100": 2.039e12,
    "TPU v4": 1.228e12,
    "TPU v5 lite": 0.819e12,
    "TPU v5e": 0.819e12,
    "TPU v5p": 2.765e12,
    "TPU v5": 2.765e12,
    "TPU v6 lite": 1.64e12,
    "TPU v6e": 1.64e12,
}

# Shares of peak or bandwidth that kinds of work reach, measured on one H200 with Qwen2.5-1.5B's shape (docs/measured/speed.md); "launch" is in seconds.
RATES: dict[str, float] = {
    "products": 0.70, "logprob update": 0.62, "logprob": 0.70, "attention": 0.50, "attention backward": 0.385,
    "memory": 0.83, "decode": 0.23, "launch": 4e-6,
}  # fmt: skip


CHUNK = 64  # tokens of a chunk of recurrent layers


@runtime_checkable
class Sizes(Protocol):
    """The sizes that FLOP counts read from an architecture."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def experts(self) -> Any: ...
    @property
    def sparse(self) -> tuple[bool, ...]: ...
    @property
    def delta(self) -> Any: ...
    @property
    def recurrent(self) -> tuple[bool, ...]: ...
    @property
    def output_gate(self) -> bool: ...


def mlp_width(sizes: Sizes) -> float:
    """Returns the width of a token's MLP as the mean over layers; in a layer with experts, that of its chosen and shared experts together."""
    experts = sizes.experts
    chosen = 0 if experts is None else experts.chosen * experts.width + (experts.shared or 0)
    return sum(chosen if sparse else sizes.mlp_width for sparse in sizes.sparse) / len(sizes.sparse)


def layer_weights(sizes: Sizes, *, sparse: bool = False, resident: bool = False, recurrent: bool = False) -> int:
    """Returns the number of weights in one layer's products: the projections of attention, or of a recurrent state, and the gated MLP.

    Args:
      sizes: an architecture.
      sparse: whether the layer has experts, whose MLP is a router and a token's experts, with a shared one and its gate.
      resident: whether all experts count, as memory holds them.
      recurrent: whether the layer holds a state in place of attention.
    """
    queries, keys = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
    mixer = (2 + sizes.output_gate) * queries + 2 * keys
    if recurrent:
        heads = sizes.delta.value_heads
        mixer = sizes.delta.channels + 2 * heads * sizes.delta.value_width + 2 * heads
    mlp = 3 * sizes.mlp_width
    if sparse:
        size = sizes.experts
        mlp = size.count + 3 * size.width * (size.count if resident else size.chosen)
        mlp += 0 if size.shared is None else 3 * size.shared + 1
    return sizes.width * (mixer + mlp)


def product_weights(sizes: Sizes, layers: int | None = None, *, resident: bool = False) -> int:
    """Returns the number of weights in the products of the first `layers` layers, or of all: those that a token uses, or all `resident` ones."""
    kinds = list(zip(sizes.sparse, sizes.recurrent))[:layers]
    return sum(layer_weights(sizes, sparse=sparse, resident=resident, recurrent=held) for sparse, held in kinds)


def rule(sizes: Sizes) -> float:
    """Returns the FLOPs of the gated delta rule in chunks, for one token of a layer with a state."""
    size = sizes.delta
    each = 6 * size.key_width * size.value_width + 4 * CHUNK * (size.key_width + size.value_width)
    return float(size.value_heads * each)


def state_bytes(sizes: Sizes) -> int:
    """Returns the bytes of one sequence's states, float32, in all layers that hold one."""
    return 4 * sum(sizes.recurrent) * math.prod(sizes.delta.state_shape) if sizes.delta is not None else 0


def attending(sizes: Sizes, layers: int | None = None) -> list[int | None]:
    """Returns the windows of the layers with attention, among the first `layers` layers or all."""
    return [window for window, held in list(zip(sizes.windows, sizes.recurrent))[:layers] if not held]


def parameters(sizes: Sizes, *, resident: bool) -> int:
    """Returns the number of weights in all products and in the embedding and an untied head: all resident ones, or those active for a token."""
    tables = 1 if getattr(sizes, "tied", False) else 2
    return product_weights(sizes, resident=resident) + tables * sizes.vocabulary_size * sizes.width


def attention_pairs(length: int, window: int | None = None) -> float:
    """Returns the number of pairs of query and key in one sequence of `length` tokens: half of the square, or of a window's band."""
    seen = length if window is None else min(length, window)
    return seen * length - seen**2 / 2


def forward(sizes: Sizes, lengths: Sequence[int], *, layers: int | None = None, head: bool = True) -> float:
    """Returns the FLOPs of one forward pass over sequences of these lengths.

    Args:
      sizes: an architecture.
      lengths: tokens of each sequence, padding left out.
      layers: number of first layers to count; None counts all.
      head: whether the head is applied to every token.

    Raises:
      ValueError: a length is negative, or `layers` exceeds the number of layers.
    """
    if any(n < 0 for n in lengths):
        raise ValueError(f"lengths are tokens of sequences, at least 0 (got {list(lengths)})")
    depth = len(sizes.windows)
    if layers is not None and not 0 <= layers <= depth:
        raise ValueError(f"layers must be between 0 and the {depth} layers of the architecture (got {layers})")
    windows, held = attending(sizes, layers), sum(sizes.recurrent[:layers])
    weights = product_weights(sizes, layers) + (sizes.vocabulary_size * sizes.width if head else 0)
    pairs = sum(attention_pairs(n, window) for n in lengths for window in windows)
    states = held * rule(sizes) * sum(lengths) if held else 0.0
    return 2.0 * weights * sum(lengths) + 4.0 * pairs * sizes.heads * sizes.head_width + states


def update(sizes: Sizes, lengths: Sequence[int], *, layers: int | None = None, head: bool = True) -> float:
    """Returns the FLOPs of one forward and backward pass over sequences of these lengths; the arguments are those of `forward`."""
    return 3.0 * forward(sizes, lengths, layers=layers, head=head)


def peak(device_kind: str) -> float | None:
    """Returns the dense bfloat16 FLOP/s of one device by its `device_kind`; None where it is unknown (a CPU)."""
    return next((flops for start, flops in PEAKS.items() if device_kind.startswith(start)), None)


def intensity(device_kind: str) -> float:
    """Returns a device's peak bfloat16 FLOPs per byte of memory traffic; the least of the known ones where the device is unknown."""
    known = {start: PEAKS[start] / bandwidth for start, bandwidth in BANDWIDTHS.items()}
    return next((x for start, x in known.items() if device_kind.startswith(start)), min(known.values()))


def mfu(flops: float, seconds: float, devices: int, device_peak: float) -> float:
    """Returns MFU, the share of all devices' peak that `flops` model FLOPs in `seconds` are.

    Raises:
      ValueError: the time, the number of devices or the peak is not positive.
    """
    if seconds <= 0 or devices < 1 or device_peak <= 0:
        raise ValueError(f"mfu needs a positive time, device count and peak (got {seconds}, {devices}, {device_peak})")
    return flops / (seconds * devices * device_peak)
