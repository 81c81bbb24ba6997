"""The base class of algorithms, with the defaults: a subclass implements `learns_from`, `advantages` and `loss`.

`grpo.PolicyGradient` is none: of these defaults it has `group_size_at_least` alone, and without a third base GRPO is read in one file.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term
from jaxrl_llm.protocols import Learns


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """The base class of an algorithm, by default without needs and controllers."""

    @property
    @abstractmethod
    def learns_from(self) -> Learns: ...

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def group_size_at_least(self) -> int:
        return 1

    @property
    def constant(self) -> float:
        """The number that a sequence adds to the count "constant"."""
        return 1.0

    @property
    def controls(self) -> Mapping[str, float]:
        """The controllers, of which there are none."""
        return {}

    def adapt(self, controls: Mapping[str, float], metrics: Mapping[str, float], sequences: int) -> Mapping[str, float]:
        """Returns the controllers as they are."""
        return controls

    @abstractmethod
    def advantages(self, sequences: Sequences) -> Advantages: ...

    @abstractmethod
    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]: ...
