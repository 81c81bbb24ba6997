"""Many open sessions do not stop the event loop: each of its turns takes a bounded amount of computing."""

import asyncio
import gc
import time

from agents.gateways import SETTINGS, rendering, speaks, user
from aiohttp import ClientSession, TCPConnector

from jaxrl_llm.agents.gateway import Gateway
from jaxrl_llm.agents.service import TokenService

SESSIONS, TURNS = 150, 2


async def watch(busy: list[float]) -> None:
    """Notes how long the thread computes between two turns of this task, which the load of other programs does not change."""
    while True:
        before = time.thread_time()
        await asyncio.sleep(0.001)
        busy.append(time.thread_time() - before)


def test_requests_that_come_together_leave_the_loop_to_others_in_between():
    """The client is in the same thread, so what is measured is more than the gateway's own part."""
    made = rendering()

    async def main():
        service = TokenService(speaks(made, ["word " * 40]), SETTINGS)
        gateway = await Gateway().start(service, made)
        points = [gateway.endpoint(service.open(seed=i)) for i in range(SESSIONS)]
        busy: list[float] = []

        async def talk(http, point):
            messages = [user("word " * 40)]
            for _ in range(TURNS):
                body, headers = {"messages": messages}, {"Authorization": f"Bearer {point.key}"}
                async with http.post(f"{point.base_url}/chat/completions", json=body, headers=headers) as answer:
                    messages += [(await answer.json())["choices"][0]["message"], user("more")]

        # Collections of what the test's process holds beside take longer than all of this.
        gc.collect()
        gc.freeze()
        watching = asyncio.create_task(watch(busy))
        try:
            async with ClientSession(connector=TCPConnector(limit=0)) as http:
                await asyncio.gather(*(talk(http, point) for point in points))
        finally:
            watching.cancel()
            gc.unfreeze()
        branches = [session.branches() for session in service.sessions]
        await gateway.close()
        return busy, branches

    busy, branches = asyncio.run(main())
    assert all(len(found) == 1 and len(found[0].turns) == TURNS for found in branches) and len(branches) == SESSIONS
    assert sorted(busy)[int(0.99 * len(busy))] < 0.1 and len(busy) > 50
