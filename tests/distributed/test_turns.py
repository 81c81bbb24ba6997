"""Threads take turns to start programs on the devices that they share."""

import asyncio
import threading

from jaxrl_llm.distributed.mesh import TURN, loops_turn


def test_the_event_loop_waits_for_a_thread_and_runs_other_tasks_meanwhile():
    holds, ends, order = threading.Event(), threading.Event(), list[str]()

    def learner() -> None:
        with TURN:
            holds.set()
            ends.wait()
            order.append("learner")

    async def rewards() -> None:
        async with loops_turn():
            order.append("rewards")

    async def run() -> None:
        learning = asyncio.create_task(asyncio.to_thread(learner))
        await asyncio.to_thread(holds.wait)
        scoring = asyncio.create_task(rewards())
        async with loops_turn(needed=False):
            order.append("sampler")
        await asyncio.sleep(0.02)
        assert order == ["sampler"]
        gone = asyncio.create_task(rewards())
        await asyncio.sleep(0)
        gone.cancel()
        ends.set()
        await asyncio.gather(learning, scoring)
        async with asyncio.timeout(1):
            await rewards()  # one that was cancelled while it waited holds nothing

    asyncio.run(run())
    assert order == ["sampler", "learner", "rewards", "rewards"]
