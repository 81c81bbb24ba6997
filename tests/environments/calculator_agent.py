"""The chat with a calculator as a program of its own would hold it: by the run's OpenAI-compatible URL, with the tool on the agent's side."""

import json
from typing import Any

import aiohttp

from jaxrl_llm.environments.calculator import Calculator
from jaxrl_llm.experience import Task
from jaxrl_llm.protocols import Endpoint


async def play(task: Task, endpoint: Endpoint) -> None:
    """Asks, answers the calls of each turn, also those that cannot be read and stand in its text, and ends with the turn that calls
    nothing, or with the request that a limit refuses."""
    messages = [*task.messages]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:
        while True:
            body = {"model": endpoint.model, "messages": messages, "tools": list(task.tools)}
            async with http.post(f"{endpoint.base_url}/chat/completions", json=body) as answer:
                if answer.status != 200:
                    return
                message = (await answer.json())["choices"][0]["message"]
            answers = {c["id"]: calculated(c) for c in message.get("tool_calls") or []}
            answers |= {f"unread{i}": "?" for i in range((message.get("content") or "").count("<tool_call>"))}
            if not answers:
                return
            messages += [
                message,
                *({"role": "tool", "tool_call_id": i, "content": said} for i, said in answers.items()),
            ]


def calculated(call: dict[str, Any]) -> str:
    """What the calculator says to a call; "?" where it cannot be read."""
    try:
        asked = json.loads(call["function"]["arguments"])["of"]
    except (ValueError, KeyError, TypeError):
        return "?"
    return Calculator().answer(asked) if call["function"]["name"] == "calc" and isinstance(asked, str) else "?"
