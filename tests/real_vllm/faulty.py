"""The worker extension, which can be told to run out of memory in the middle of a load."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from jaxrl_llm.publication.vllm_plugin import OrbaxWorkerExtension


class FaultyExtension(OrbaxWorkerExtension):
    """Fails the next load after a number of tensors."""

    def fail_next_load(self, after: str) -> None:
        real = self.reload_weights  # type: ignore[attr-defined]

        def failing(weights_iterator: Iterator[Any]) -> None:
            self.reload_weights = real
            real(weights_iterator=_cut(weights_iterator, int(after)))

        self.reload_weights = failing


def _cut(tensors: Iterator[Any], after: int) -> Iterator[Any]:
    yield from islice(tensors, after)
    raise MemoryError("no memory left on the device")
