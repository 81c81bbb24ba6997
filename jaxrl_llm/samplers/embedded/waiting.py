"""Waits for the embedded sampler's programs to end."""

import asyncio
from typing import Any

import jax

_TURNS = 16  # turns of the event loop in which an environment's answer becomes the next request; it takes four


async def finished(chunk: Any) -> None:
    """Waits for a chunk, such that several processes, which all run the engine, choose the next programs at the same point.

    A thread would end at different times on each of them, and so would requests that follow an answer come at different times.
    """
    if jax.process_count() == 1:
        await asyncio.to_thread(jax.block_until_ready, chunk)
        return
    jax.block_until_ready(chunk)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
