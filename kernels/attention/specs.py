"""Shapes of real models at which attention is tested and benchmarked."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One shape of a call on packed rows.

    Attributes:
      batch: number of rows, B.
      length: tokens of a row, T.
      heads: number of query heads, H.
      kv_heads: number of key and value heads, K.
      width: width of a head, C.
      segments: number of segments of equal length in a row.
      window: sliding window in tokens, or None.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    segments: int = 1
    window: int | None = None


SPECS = {
    "quickstart": Spec(batch=8, length=256, heads=4, kv_heads=2, width=32, segments=4),
    "qwen2.5-3b": Spec(batch=4, length=8192, heads=16, kv_heads=2, width=128),
    "qwen2.5-3b-packed": Spec(batch=4, length=8192, heads=16, kv_heads=2, width=128, segments=8),
    "llama3.2-1b": Spec(batch=4, length=4096, heads=32, kv_heads=8, width=64, segments=4),
    "mistral-7b": Spec(batch=1, length=16384, heads=32, kv_heads=8, width=128, window=4096),
}
