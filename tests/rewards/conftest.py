"""Scores texts as the responses to one prompt; serves applications on loopback."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI

from jaxrl_llm.experience import Group, Prompt, Rollout, Scores
from jaxrl_llm.protocols import Reward

Score = Callable[..., Scores]
MakeGroup = Callable[..., Group]
Serve = Callable[[FastAPI], str]


def rollout(prompt: Prompt, text: str) -> Rollout:
    return Rollout(
        prompt=prompt,
        tokens=np.zeros(0, np.int32),
        sampler_logprobs=np.zeros(0, np.float32),
        mask=np.zeros(0, bool),
        versions=np.zeros(0, np.int32),
        finish="stop",
        text=text,
    )


def scored(
    reward: Reward, texts: Sequence[str], reference: str = "", extra: Mapping[str, Any] | None = None, source: str = ""
) -> Group:
    prompt = Prompt(id="p", text="?", reference=reference, extra=extra or {}, source=source)
    rollouts = [rollout(prompt, text) for text in texts]
    return Group(rollouts=rollouts, scores=asyncio.run(reward.score(rollouts)))


@pytest.fixture
def group() -> MakeGroup:
    """(reward, texts, reference, extra, source) -> the texts as one group with its scores."""
    return scored


@pytest.fixture
def score() -> Score:
    """(reward, texts, reference, extra, source) -> Scores of the texts as one group."""

    def run(*arguments: Any, **options: Any) -> Scores:
        return scored(*arguments, **options).scores

    return run


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serves `app` in a thread, on a port that the system chooses."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", loop="asyncio"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started, "the server did not start"
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def serve_for_module() -> Iterator[Serve]:
    """application -> its address while the module's tests run."""
    with contextlib.ExitStack() as stack:
        yield lambda app: stack.enter_context(listening(app))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """application -> its address while the test runs."""
    with contextlib.ExitStack() as stack:
        yield lambda app: stack.enter_context(listening(app))
