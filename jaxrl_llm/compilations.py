"""Counts the programs that XLA compiled, or read from its cache, in this process: a run's steps should add none."""

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Programs made since the last look; made once in a process, before what it is to count."""

    def __init__(self) -> None:
        self._made, self._seen = 0, 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self._made += event == EVENT

    def take(self) -> int:
        """Programs made since the last call."""
        new, self._seen = self._made - self._seen, self._made
        return new
