"""Checks linear layers that a vLLM server keeps in fp8, which vLLM quantizes while it loads published weights (torch, imported inside functions).

    vllm serve MODEL --quantization fp8_per_channel ...          # or fp8_per_tensor, fp8_per_block

Published weights have 16 or 32 bits here too. vLLM's layer-wise reload gathers the parts of a layer, quantizes it and copies the result
over the one before. A checksum of the published bits does not check that result, so it is followed through the load:

  1. before a layer is quantized, the checksums of its loaded weights must equal the published ones exactly;
  2. the quantized weights times their scales may differ from the loaded ones by no more than rounding to fp8 allows, in every element;
  3. after the load, the layer holds those very bits.

Embedding, output head, norms and biases stay as they are published and are compared as in any other server.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.publication.held_weights import Weights, WrongWeights, tensor_sum
from jaxrl_llm.publication.parts import Target, whole_box

SCALES = {"weight_scale", "weight_scale_inv"}
# vLLM's methods that quantize weights while loading, and whether they store them transposed.
_METHODS = {
    "Fp8PerTensorOnlineLinearMethod": True,
    "Fp8PtpcOnlineLinearMethod": True,
    "Fp8PerBlockOnlineLinearMethod": False,
}
_FP8 = "float8_e4m3fn"
_HALF_STEP, _SMALLEST = (
    2.0**-4,
    2.0**-10,
)  # the largest rounding of an element relative to it, and of an element near zero
_SLACK = 1.01  # for scales that are multiplied by their reciprocals in float32
_ELEMENTS = 1 << 22  # elements that are compared at a time
_BLOCK = 128

Part = tuple[str, Target]


def quantizes(layer: Any) -> bool:
    """Returns whether a layer of vLLM's quantizes loaded weights to fp8."""
    return type(getattr(layer, "quant_method", None)).__name__ in _METHODS


@dataclass(eq=False, kw_only=True)
class Followed:
    """The quantized layers of a model in a load: the weights that they were given, and the results.

    Attributes:
      wanted: paths of all quantized layers.
      sums: checksum of each loaded tensor, by its Hugging Face name, int64 scalar on the device.
      published: element type and checksum by name, complete once all tensors are loaded.
      layers: by path, each layer and the checksums of its parameters after it was quantized.
      errors: by path, for each layer of a known form, [largest error relative to the allowed one, squared error, squared weights].
      weights: position weights of the checksums.
    """

    wanted: set[str] = field(default_factory=set)
    published: Mapping[str, tuple[str, int]]
    sums: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    errors: dict[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)

    def quantize(self, path: str, layer: Any, parts: Sequence[Part], own: Callable[[Any], None]) -> None:
        """Quantizes a layer by vLLM's own method `own`, and records the checksums before and after."""
        loaded, first = layer.weight, 0
        for name, target in parts:
            rows = target.box[0].stop - target.box[0].start
            part, kind = loaded.data[first : first + rows], self.published[name][0]
            self.sums[name] = tensor_sum(part, target, kind, self.weights)
            first += rows
        own(layer)
        self.layers[path] = (layer, _bits(layer, self.weights))
        if (error := _error(loaded, layer)) is not None:
            self.errors[path] = error

    def rounding(self) -> float:
        """Returns the root mean square error of all quantized weights relative to them; 0 where none were quantized, or in an unknown form.

        Raises:
          WrongWeights: a layer's values are not the loaded ones after rounding, or have changed since.
        """
        import torch

        if kept := sorted(self.wanted - self.layers.keys()):
            raise WrongWeights(f"{len(kept)} layers were not quantized anew, the first is {kept[0]!r}")
        for path, (layer, bits) in self.layers.items():
            if not torch.equal(_bits(layer, self.weights), bits):
                raise WrongWeights(f"layer {path!r} does not hold what its quantization gave")
        if not self.errors:
            return 0.0
        found = torch.stack(list(self.errors.values())).cpu()
        if not bool((found[:, 0] <= _SLACK).all()):  # false for NaN
            path = list(self.errors)[int(found[:, 0].nan_to_num(float("inf")).argmax())]
            raise WrongWeights(f"layer {path!r} holds other numbers in fp8 than rounding what was loaded gives")
        return float((found[:, 1].sum() / found[:, 2].sum().clamp_min(1e-30)).sqrt())


@contextmanager
def followed(
    layers: Iterator[tuple[str, Any, Sequence[Part]]], published: Mapping[str, tuple[str, int]]
) -> Iterator[Followed]:
    """Follows the quantized layers of a model, given as path, layer and the parts of its weight, through the loads in this context."""
    follower = Followed(published=published)
    changed = []
    try:
        for path, layer, parts in layers:
            method = layer.quant_method
            own = method.process_weights_after_loading

            def follow(given: Any, *, path: str = path, parts: Sequence[Part] = parts, own: Any = own) -> None:
                follower.quantize(path, given, parts, own)

            method.process_weights_after_loading = follow
            changed.append(method)
            follower.wanted.add(path)
        yield follower
    finally:
        for method in changed:
            del method.process_weights_after_loading


def _bits(layer: Any, weights: Weights) -> Any:
    """Returns checksums of a quantized layer's weight and scales as they are stored in memory, int64 [P]."""
    import torch

    found = []
    for name, parameter in sorted(layer.named_parameters(recurse=False)):
        if name == "weight" or name in SCALES:
            held = parameter.data if parameter.ndim > 1 else parameter.data.reshape(1, -1)
            whole = Target(shape=tuple(held.shape), box=whole_box(held.shape))
            found.append(tensor_sum(held, whole, str(held.dtype).removeprefix("torch."), weights))
    return torch.stack(found)


def _error(loaded: Any, layer: Any) -> Any | None:
    """Compares a weight [N, K] with its quantized form; returns None where the kernel stores that in another form.

    Returns:
      float64 [3]: the largest |error| relative to the allowed one, the sum of squared errors and the sum of squared weights.
    """
    import torch

    quantized, scale = layer.weight.data, _scale(layer)
    rows = quantized.t() if _METHODS[type(layer.quant_method).__name__] else quantized
    if str(quantized.dtype) != f"torch.{_FP8}" or rows.shape != loaded.shape or scale is None:
        return None
    total = torch.zeros(3, dtype=torch.float64, device=loaded.device)
    step = max(1, _ELEMENTS // loaded.shape[1])
    for begin in range(0, len(loaded), step):
        block, held = loaded.data[begin : begin + step].float(), rows[begin : begin + step].float()
        by = scale[begin : begin + step]
        by = by if by.shape[1] == 1 else by.repeat_interleave(_BLOCK, 1)[:, : block.shape[1]]
        apart = block / by - held
        allowed = (held.abs() * _HALF_STEP).clamp_min(_SMALLEST)
        total[0] = torch.maximum(total[0], (apart.abs() / allowed).max().double())
        total[1] += (apart * by).square().sum(dtype=torch.float64)
        total[2] += block.square().sum(dtype=torch.float64)
    return total


def _scale(layer: Any) -> Any | None:
    """Returns a layer's scales by row of its weight [N, K]: [N, 1], or [N, K / 128] of blocks; None where they are of another form."""
    found = next((getattr(layer, name) for name in sorted(SCALES) if getattr(layer, name, None) is not None), None)
    if found is None or str(found.dtype) != "torch.float32":
        return None
    rows, columns, scale = layer.output_size_per_partition, layer.input_size_per_partition, found.data
    if getattr(layer, "weight_block_size", None):
        blocks = (-(-rows // _BLOCK), -(-columns // _BLOCK))
        return scale.repeat_interleave(_BLOCK, 0)[:rows] if tuple(scale.shape) == blocks else None
    return scale.reshape(-1, 1).expand(rows, 1) if scale.numel() in (1, rows) else None
