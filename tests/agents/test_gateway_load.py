"""Many requests at once do not stop the event loop: few are taken in one of its turns."""

import asyncio
from collections import Counter

from agents.gateways import SETTINGS, rendering, speaks, user
from aiohttp import ClientSession, TCPConnector

from jaxrl_llm.agents import chat_request
from jaxrl_llm.agents.gateway import Gateway
from jaxrl_llm.agents.service import TokenService

SESSIONS, TURNS = 100, 2


def test_requests_that_come_together_leave_the_loop_to_others_in_between(monkeypatch):
    made = rendering()
    now, taken = [0], Counter()
    read = chat_request.read

    def counted(body, session):
        taken[now[0]] += 1
        return read(body, session)

    monkeypatch.setattr(chat_request, "read", counted)

    async def tick():
        while True:
            now[0] += 1
            await asyncio.sleep(0)

    async def main():
        service = TokenService(speaks(made, ["word " * 40]), SETTINGS)
        gateway = await Gateway().start(service, made)
        points = [gateway.endpoint(service.open(seed=i)) for i in range(SESSIONS)]

        async def talk(http, point):
            messages = [user("word " * 40)]
            for _ in range(TURNS):
                body, headers = {"messages": messages}, {"Authorization": f"Bearer {point.key}"}
                async with http.post(f"{point.base_url}/chat/completions", json=body, headers=headers) as answer:
                    messages += [(await answer.json())["choices"][0]["message"], user("more")]

        ticking = asyncio.create_task(tick())
        async with ClientSession(connector=TCPConnector(limit=0)) as http:
            await asyncio.gather(*(talk(http, point) for point in points))
        ticking.cancel()
        branches = [session.branches() for session in service.sessions]
        await gateway.close()
        return branches

    branches = asyncio.run(main())
    assert len(branches) == SESSIONS and all(len(found) == 1 and len(found[0].turns) == TURNS for found in branches)
    assert sum(taken.values()) == SESSIONS * TURNS
    assert max(taken.values()) <= 16  # 8 on each side of the counter's own turn
