"""Shapes of real models at which log_softmax_entropy is tested and benchmarked."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One shape of a call.

    Attributes:
      tokens: number of rows of the logits, T.
      vocabulary: number of columns of the logits, V.
    """

    tokens: int
    vocabulary: int


SPECS = {
    "quickstart": Spec(tokens=2048, vocabulary=512),
    "qwen2.5-3b": Spec(tokens=8192, vocabulary=151936),
    "llama3.2-1b": Spec(tokens=8192, vocabulary=128256),
}
