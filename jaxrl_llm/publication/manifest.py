"""The manifest of a published version of the weights: names, shapes, types, checksums, and a canary (NumPy only).

Checksum of a tensor, seen as a matrix u [rows, columns] of unsigned words (the elements' bits; the columns are its last axis, a
vector is one row):

    sum over r, c of u[r, c] * weight(2 r) * weight(2 c + 1)   mod 2^32,    weight(p) = mix(p) | 1

with mix the 32-bit finalizer of MurmurHash3. It is a sum over elements, so hosts add up the sums of their own shards, and ranks those
of their own parts: nothing is gathered. Weights are odd, so every single flipped bit is detected; rows and columns have weights of
their own, so a transposition is detected too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

FORMAT = 3
FILE = "manifest.json"
WEIGHTS = "weights"  # the folder of the orbax checkpoint, beside the manifest
_BLOCK_BYTES = 1 << 19  # bytes of words that are summed at a time, so that the products stay in cache


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a version.

    Attributes:
      shape: lengths of the axes, in the layout of Hugging Face's checkpoints.
      dtype: NumPy's name of the element type ("bfloat16", "float32").
      checksum: eight hexadecimal digits, as the module describes.
    """

    shape: tuple[int, ...]
    dtype: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Canary:
    """A fixed token sequence with the learner's scores under this version.

    Attributes:
      tokens: token ids, T of them.
      logprobs: the learner's log-probability of each token but the first given those before it, T - 1 of them, in nats.
      likely: the learner's most likely token after each token but the last, T - 1 token ids.
      likely_logprobs: the learner's log-probabilities of those tokens, in nats.
      limit: largest ratio of `publication.canary` that passes.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    likely: tuple[int, ...]
    likely_logprobs: tuple[float, ...]
    limit: float

    def __post_init__(self) -> None:
        counts = {len(self.logprobs), len(self.likely), len(self.likely_logprobs)}
        if counts != {len(self.tokens) - 1} or len(self.tokens) < 2:
            raise ValueError(
                f"a canary of {len(self.tokens)} tokens has {sorted(counts)} log-probs and likely tokens: "
                "it needs one for each token but the first, and at least two tokens"
            )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a published version.

    Attributes:
      version: number of the version among the learner's publications.
      model_type: Hugging Face's name of the architecture ("qwen2").
      tied: whether the output head is the embedding; there is then no tensor `lm_head.weight`.
      tensors: every tensor by its Hugging Face name.
      forward: settings of the policy's config.json that shape the forward pass, as `publication.forward` returns them.
      canary: a sequence on which learner and server are compared, or None.
    """

    version: int
    model_type: str
    tied: bool
    tensors: Mapping[str, TensorEntry]
    forward: Mapping[str, Any]
    canary: Canary | None = None

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Manifest":
        """Parses the text of manifest.json; raises ValueError where it is not a manifest of a known format."""
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}; this reader knows format {FORMAT}")
            canary = content["canary"]
            return Manifest(
                version=int(content["version"]),
                model_type=str(content["model_type"]),
                tied=bool(content["tied"]),
                tensors={name: _entry(entry) for name, entry in content["tensors"].items()},
                forward=dict(content["forward"]),
                canary=None if canary is None else _canary(canary),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as wrong:
            raise ValueError(f"{FILE} cannot be read: {wrong!r}; publish the version again") from wrong


def _entry(content: Mapping[str, Any]) -> TensorEntry:
    element_type(content["dtype"])
    return TensorEntry(
        shape=tuple(int(n) for n in content["shape"]), dtype=content["dtype"], checksum=str(content["checksum"])
    )


def _canary(content: Mapping[str, Any]) -> Canary:
    return Canary(
        tokens=tuple(int(t) for t in content["tokens"]),
        logprobs=tuple(float(x) for x in content["logprobs"]),
        likely=tuple(int(t) for t in content["likely"]),
        likely_logprobs=tuple(float(x) for x in content["likely_logprobs"]),
        limit=float(content["limit"]),
    )


def element_type(name: str) -> np.dtype:
    """Returns NumPy's type of a name, bfloat16 and the 8-bit floats of ml_dtypes included; raises ValueError for another name."""
    try:
        return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    except TypeError as unknown:
        raise ValueError(f"dtype {name!r} is no element type; allowed are NumPy's and ml_dtypes' names") from unknown


def weights_of(positions: Any) -> Any:
    """Returns the odd weight of each position: uint32 in, uint32 out, for NumPy and JAX arrays alike, since only operators are used."""
    x = positions ^ (positions >> 16)
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> 13)
    x = x * np.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)) | np.uint32(1)


def partial_sum(part: np.ndarray, origin: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the contribution of a tensor's box to the tensor's checksum, 0 <= sum < 2^32.

    Args:
      part: the elements of the box.
      origin: index of its first element in the whole tensor, one number an axis.
      shape: shape of the whole tensor.
    """
    if len(origin) != part.ndim or len(shape) != part.ndim:
        raise ValueError(f"a part of {part.ndim} axes needs an origin and a shape of as many, got {origin} and {shape}")
    words = np.atleast_1d(np.ascontiguousarray(part)).view(f"u{part.dtype.itemsize}")
    words = words.reshape(-1, words.shape[-1]) if words.size else words.reshape(0, 1)
    rows = np.zeros((), np.uint32)
    for axis in range(part.ndim - 1):
        rows = rows[..., None] * np.uint32(shape[axis]) + _positions(origin[axis], part.shape[axis])
    columns = _positions(origin[-1] if part.ndim else 0, words.shape[1])
    by_column = weights_of(columns * np.uint32(2) + np.uint32(1))
    step = max(1, _BLOCK_BYTES // (4 * words.shape[1]))
    of_rows = [
        (words[first : first + step] * by_column).sum(axis=1, dtype=np.uint32) for first in range(0, len(words), step)
    ]
    if not of_rows:
        return 0
    by_row = weights_of(rows.reshape(-1) * np.uint32(2))
    return int((np.concatenate(of_rows) * by_row).sum(dtype=np.uint32))


def _positions(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int64).astype(np.uint32)


def checksum(array: np.ndarray) -> str:
    """Returns the checksum of a whole tensor: eight hexadecimal digits."""
    return digits(partial_sum(array, (0,) * array.ndim, array.shape))


def digits(total: int) -> str:
    """Returns a sum of partial sums in the manifest's form, eight hexadecimal digits."""
    return f"{total % (1 << 32):08x}"
