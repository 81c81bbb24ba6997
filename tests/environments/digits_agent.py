"""An agent whose reward a policy without any training sometimes gets: the share of digits in what it says."""

import aiohttp

from jaxrl_llm.experience import Task
from jaxrl_llm.protocols import Endpoint


async def play(task: Task, endpoint: Endpoint) -> dict[str, float]:
    """Asks once by the chat route."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:
        body = {"model": endpoint.model, "messages": [*task.messages]}
        async with http.post(f"{endpoint.base_url}/chat/completions", json=body) as answer:
            text = (await answer.json())["choices"][0]["message"]["content"] or ""
    return {"digits": sum(character.isdigit() for character in text) / max(len(text), 1)}
