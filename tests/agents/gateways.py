"""A gateway that listens, over a scripted sampler or another, and a client of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from agents.chat_tokenizers import TEMPLATES, chat_tokenizer
from agents.scripted import Scripted

from jaxrl_llm.agents.gateway import Gateway, RunningGateway
from jaxrl_llm.agents.rendering import Rendering
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.agents.session import Session
from jaxrl_llm.experience import SamplingParams

SETTINGS = SamplingParams(max_tokens=400)


def rendering(name: str = "qwen3", **settings: Any) -> Rendering:
    return Rendering(chat_tokenizer(TEMPLATES[name]), **settings)


def speaks(made: Rendering, texts: Sequence[str]) -> Scripted:
    """A sampler that says the texts one after the other, each with the end token; the last one again and again."""
    said = iter(texts)
    last = [""]

    def script(prefix: np.ndarray, seed: int, settings: SamplingParams) -> list[int]:
        del prefix, seed
        last[0] = next(said, last[0])
        text = last[0]
        for (
            stop
        ) in settings.stop_strings:  # as samplers do: the tokens of a stop string are kept, and nothing after them
            if stop in text:
                head = text[: text.index(stop) + len(stop)]
                return [*made.tokenizer(head, add_special_tokens=False)["input_ids"]]
        return [*made.tokenizer(text, add_special_tokens=False)["input_ids"], made.stop_token_ids[0]]

    return Scripted(script)


@dataclass
class Talk:
    """One session of a gateway, and requests to it."""

    gateway: RunningGateway
    session: Session
    http: aiohttp.ClientSession

    async def post(self, route: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Returns status, headers and JSON of an answer."""
        point = self.gateway.endpoint(self.session)
        headers = {"Authorization": f"Bearer {point.key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
        base = point.base_url.removesuffix("/v1") if route.startswith("/inference") else point.base_url
        async with self.http.post(base + route, json=body, headers=headers) as answer:
            text = await answer.text()
            return (
                answer.status,
                answer.headers,
                json.loads(text) if answer.content_type == "application/json" else text,
            )

    async def chat(self, messages: Sequence[dict[str, Any]], **more: Any) -> tuple[int, Any, Any]:
        return await self.post("/chat/completions", {"model": "policy", "messages": list(messages), **more})

    async def say(self, messages: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Returns the message of an answer."""
        status, _, body = await self.chat(messages, **more)
        assert status == 200, body
        return body["choices"][0]["message"]


@asynccontextmanager
async def talking(
    sampler: Any, made: Rendering | None = None, *, config: Gateway | None = None, settings: SamplingParams = SETTINGS, **limits: Any
) -> AsyncIterator[Talk]:  # fmt: skip
    """A session of a gateway over `sampler`; no task of theirs is left afterwards."""
    service = TokenService(sampler, settings)
    gateway = await (config or Gateway()).start(service, made)
    try:
        async with aiohttp.ClientSession() as http:
            yield Talk(gateway, service.open(**{"seed": 1, **limits}), http)
    finally:
        await gateway.close()
        await service.close()
    left = [task for task in asyncio.all_tasks() if "jaxrl_llm/agents/" in repr(task)]
    assert not left, f"tasks are left: {left}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
