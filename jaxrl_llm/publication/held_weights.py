"""Compares the tensors of a server's model with their published checksums after a load, exactly (PyTorch, imported inside functions).

The staged tensors are compared with the manifest before the load; here the model itself is compared after it: a tensor that a loader
left out, misplaced, transposed or changed differs from the published one by at least one bit, and no tolerance is needed. The sum is
that of the manifest, and it is computed on the tensor's device, some rows at a time.

On a CPU vLLM packs matrices into a form of its own and drops the tensors; such tensors are counted as unchecked, with their names.
Matrices that a server quantizes are compared as they were loaded (`vllm_fp8`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.publication.manifest import digits, weights_of
from jaxrl_llm.publication.parts import Target

_ELEMENTS = 1 << 22  # elements that are summed at a time
_WIDER = {("bfloat16", "float32"), ("float16", "float32")}  # (published type, wider type that holds each of its values)


class WrongWeights(RuntimeError):
    """Raised where a model's weights differ from the published ones."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The coverage of a comparison.

    Attributes:
      checked: number of tensors whose checksums equal the published ones.
      unchecked: names of tensors that the model keeps in another form, which were not compared.
      quantized: number of those of `checked` that were compared as loaded, before the server quantized them.
      rounding: root mean square error of the quantized weights relative to the weights; 0 where none were quantized, or in an unknown form.
    """

    checked: int
    unchecked: tuple[str, ...]
    quantized: int = 0
    rounding: float = 0.0


def compare(
    held: Mapping[str, Any | None],
    targets: Mapping[str, Target],
    published: Mapping[str, tuple[str, int]],
    loaded: Mapping[str, Any] | None = None,
    rounding: Callable[[], float] = float,
) -> Held:
    """Compares the model's tensors with the published ones.

    Args:
      held: this rank's part of each tensor as the model holds it, a torch tensor by Hugging Face name; None where it is in another form.
      targets: the parts' places in the whole tensors.
      published: the element type of each tensor, and the sum of this rank's part.
      loaded: sums of the tensors that the model keeps in another form, computed from the loaded tensors, int64 scalars by name.
      rounding: returns the rounding of those, as in `Held`.

    Raises:
      WrongWeights: a tensor is of a narrower type, or its sum differs; the message has their number and the first name.
    """
    import torch

    here = {name: tensor for name, tensor in held.items() if tensor is not None}
    wrong_type = [name for name, tensor in here.items() if not _holds(_name(tensor), published[name][0])]
    if wrong_type:
        name = wrong_type[0]
        raise WrongWeights(
            f"{len(wrong_type)} tensors have another element type than what was published, the first is {name!r}: "
            f"{_name(here[name])} here, {published[name][0]} there; start the server with --dtype {published[name][0]}"
        )
    weights, before = Weights(), dict(loaded or {})
    found = [tensor_sum(tensor, targets[name], published[name][0], weights) for name, tensor in here.items()]
    found += before.values()
    if not found:
        return Held(checked=0, unchecked=tuple(held), rounding=rounding())
    sums: dict[str, int] = dict(zip((*here, *before), torch.stack(found).tolist(), strict=True))
    wrong = [name for name, total in sums.items() if total != published[name][1]]
    if wrong:
        got, said = digits(sums[wrong[0]]), digits(published[wrong[0]][1])
        raise WrongWeights(
            f"{len(wrong)} of {len(sums)} tensors in the model differ from what was published, the first is {wrong[0]!r} "
            f"(checksum {got}, published is {said})"
        )
    unchecked = tuple(name for name in held if name not in sums)
    return Held(checked=len(sums), unchecked=unchecked, quantized=len(before), rounding=rounding())


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _holds(held: str, published: str) -> bool:
    return held == published or (published, held) in _WIDER


class Weights:
    """The checksum's weights of positions as torch's int32, made once for each range and device."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int, Any], Any] = {}

    def __call__(self, first: int, count: int, parity: int, device: Any) -> Any:
        import torch

        key = (first, count, parity, device)
        if key not in self._made:
            positions = np.arange(first, first + count, dtype=np.int64).astype(np.uint32)
            odd = weights_of(positions * np.uint32(2) + np.uint32(parity))
            self._made[key] = torch.from_numpy(odd.view(np.int32)).to(device)
        return self._made[key]


def tensor_sum(part: Any, target: Target, dtype: str, weights: Weights | None = None) -> Any:
    """Returns the contribution of a tensor's part, of one axis or more, to the tensor's checksum: `manifest.partial_sum` in torch.

    Args:
      part: the part, in `dtype` or a wider type whose values are all of `dtype`.
      target: the part's place in the tensor.
      dtype: the published element type.
      weights: position weights, shared by the tensors of a model.

    Returns:
      int64 scalar on the part's device, the sum modulo 2^32, or -1 where a value is not representable in `dtype`.
    """
    import torch

    weights = weights or Weights()
    columns = target.box[-1]
    by_column = weights(columns.start, columns.stop - columns.start, 1, part.device)
    rows = part.reshape(-1, part.shape[-1]) if part.numel() else part.reshape(0, 1)
    by_row = _row_weights(target, len(rows), weights, part.device)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    exact = torch.ones((), dtype=torch.bool, device=part.device)
    step = max(1, _ELEMENTS // max(1, rows.shape[-1]))
    for begin in range(0, len(rows), step):
        block = rows[begin : begin + step]
        if _name(block) != dtype:
            narrow = block.to(getattr(torch, dtype))
            exact = exact & (narrow.to(block.dtype) == block).all()
            block = narrow
        words = _words(block.contiguous())
        of_rows = (words * by_column).sum(dim=1, dtype=torch.int32)  # int32 wraps around, as sums modulo 2^32 do
        total = total + (of_rows * by_row[begin : begin + step]).sum(dtype=torch.int32)
    return torch.where(exact, total % (1 << 32), torch.full_like(total, -1))


def _row_weights(target: Target, rows: int, weights: Weights, device: Any) -> Any:
    """Returns the weights of a part's rows by their numbers in the whole tensor, whose axes but the last are flattened."""
    import torch

    if len(target.box) < 3:
        return weights(target.box[0].start if len(target.box) == 2 else 0, rows, 0, device)
    numbers: Any = np.zeros((), np.uint32)
    for size, axis in zip(target.shape[:-1], target.box[:-1]):
        numbers = numbers[..., None] * np.uint32(size) + np.arange(axis.start, axis.stop, dtype=np.uint32)
    return torch.from_numpy(weights_of(numbers.reshape(-1) * np.uint32(2)).view(np.int32)).to(device)


def _words(block: Any) -> Any:
    """Returns the elements' bits as int32, zero-extended from 8 or 16 bits."""
    import torch

    size = block.element_size()
    if size == 4:
        return block.view(torch.int32)
    if size == 2:
        return block.view(torch.int16).to(torch.int32) & 0xFFFF
    return block.view(torch.uint8).to(torch.int32)
