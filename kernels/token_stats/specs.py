"""Shapes of real models at which token_stats is tested and benchmarked."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One shape of a call.

    Attributes:
      tokens: number of rows of the hidden states, T.
      width: width of the hidden states, D.
      vocabulary: number of entries of the head, V.
      soft_cap: bound of the logits, or None.
    """

    tokens: int
    width: int
    vocabulary: int
    soft_cap: float | None = None


SPECS = {
    "quickstart": Spec(tokens=2048, width=128, vocabulary=512),
    "qwen2.5-0.5b": Spec(tokens=1024, width=896, vocabulary=151936),
    "qwen2.5-3b": Spec(tokens=8192, width=2048, vocabulary=151936),
    "qwen2.5-7b": Spec(tokens=16384, width=3584, vocabulary=151936),
    "qwen2.5-7b-long": Spec(tokens=65536, width=3584, vocabulary=151936),
    "qwen3-0.6b-unpadded": Spec(tokens=8191, width=1024, vocabulary=151669),
    "llama3.2-1b": Spec(tokens=8192, width=2048, vocabulary=128256),
    "liger": Spec(tokens=8192, width=4096, vocabulary=131072),
    "smollm2": Spec(tokens=32768, width=960, vocabulary=49152),
    "gemma2-2b": Spec(tokens=8192, width=2304, vocabulary=256000, soft_cap=30.0),
}
