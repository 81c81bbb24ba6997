"""Many requests at once do not stop the event loop: few are taken in one of its turns, and Python seldom looks at all objects."""

import asyncio
import gc
import weakref
from collections import Counter

import numpy as np
from agents.gateways import SETTINGS, rendering, speaks, user
from aiohttp import ClientSession, TCPConnector

from jaxrl_llm.agents import chat_request
from jaxrl_llm.agents import service as service_module
from jaxrl_llm.agents.gateway import Gateway
from jaxrl_llm.agents.service import TokenService

SESSIONS, TURNS = 100, 2


def test_requests_that_come_together_leave_the_loop_to_others_in_between(monkeypatch):
    made = rendering()
    now, taken = [0], Counter()
    read = chat_request.read

    def counted(body, session, adapter):
        taken[now[0]] += 1
        return read(body, session, adapter)

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


def test_full_collections_of_garbage_are_rare_while_a_gateway_listens():
    usual = gc.get_threshold()

    async def main():
        service = TokenService(speaks(rendering(), ["x"]), SETTINGS)
        first, second = [await Gateway().start(service) for _ in range(2)]
        rare = gc.get_threshold()
        await first.close()
        await first.close()  # as a run that ends in an error may do
        assert gc.get_threshold() == rare
        await second.close()
        return rare

    rare = asyncio.run(main())
    assert rare[:2] == usual[:2] and rare[2] >= 1000 > usual[2] and gc.get_threshold() == usual


def test_garbage_is_collected_after_a_step_where_it_is_due_and_the_sampler_has_no_call(monkeypatch):
    class Cycle:
        pass

    def left():
        thrown = Cycle()
        thrown.itself = thrown
        return weakref.ref(thrown)

    async def main():
        sampler = speaks(rendering(), ["x"])
        sampler.delay_s = 0.2
        service = TokenService(sampler, SETTINGS)
        gateway = await Gateway().start(service)
        session = service.open(seed=0)
        gc.collect()
        gc.disable()  # of young objects
        try:
            thrown = left()
            call = asyncio.create_task(service.continue_(session, np.arange(1, 4)))
            await asyncio.sleep(0.05)
            with monkeypatch.context() as due:
                due.setattr(service_module, "_DUE", 0)
                service.take()
            assert thrown() is not None
            await call
            service.take()
            assert thrown() is not None  # none of the middle generation was collected, so that it is not due
            monkeypatch.setattr(service_module, "_DUE", 0)
            service.take()
            assert thrown() is None
        finally:
            gc.enable()
            await gateway.close()

    asyncio.run(main())


def test_a_closed_session_is_remembered_without_its_calls():
    async def main():
        service = TokenService(speaks(rendering(), ["x"]), SETTINGS)
        session = service.open(seed=0)
        await service.continue_(session, np.arange(1, 4))
        session.close()
        known = service.session(session.id)
        assert known is not None and known.closed and known.key == session.key
        assert len(session.calls) == 1 and not known.calls

    asyncio.run(main())
