"""Slow and hung servers change neither which tokens are drawn nor how long responses are."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from fake_vllm import VOCABULARY, FakeVllm, table
from fleet_cases import checked, collect, until

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.servers import fleet
from jaxrl_llm.samplers.servers.server_update import Progress

pytestmark = pytest.mark.usefixtures("quick_heart")
GENERATE = "/inference/v1/generate"
LIMIT = 20  # tokens: what 4,096 are to a real response
STOPS = (3, 7)
MOST_TURNS = 20  # on a loaded machine a hang takes several turns to be seen


def share_of_cut_answers(prefixes: Sequence[np.ndarray]) -> float:
    """The probability that a response meets no stop within the limit, by the toy's own transition matrix."""
    step = np.exp(table(0))
    step[:, list(STOPS)] = 0.0
    left = np.linalg.matrix_power(step, LIMIT).sum(axis=1)
    return float(np.mean([left[prefix[-1]] for prefix in prefixes]))


async def freeze_now_and_then(server: FakeVllm) -> None:
    """Draws for a moment, then hangs until its client has seen it."""
    while True:
        await asyncio.sleep(0.1)
        server.frozen = True
        calls = len(server.calls)
        await until(lambda calls=calls: "pause abort true" in server.calls[calls:])
        server.frozen = False


@pytest.mark.parametrize("faults", ["none", "one slow", "one slow, one that hangs"])
@pytest.mark.slow
def test_slow_and_hung_servers_leave_the_lengths_of_answers_as_they_are(start, faults):
    """Draws do not repeat, as those of a GPU: an answer that was asked again from its beginning, or raced, would be a shorter one."""
    rng = np.random.default_rng(2)
    asked = [rng.integers(0, VOCABULARY, 4).astype(np.int32) for _ in range(150)]
    settings = SamplingParams(max_tokens=LIMIT, stop_token_ids=STOPS)

    async def run() -> list[int]:
        servers = [FakeVllm(step_s=0.002, repeats=False) for _ in range(3)]
        if faults != "none":
            servers[1].step_s = 0.05
        async with start(
            servers,
            seeded=False,
            straggler_s=0.25 if "hangs" in faults else 2.0,
            straggler=2.0,
            inflight="abort_resume",
            tries=200,
        ) as client:
            await client.publish({}, 0)
            await collect(client, asked[:9], 1, settings)
            freezing = asyncio.create_task(freeze_now_and_then(servers[2])) if "hangs" in faults else None
            cut: list[bool] = []
            found: Counter[str] = Counter()
            for turn in range(MOST_TURNS):
                groups = await collect(client, asked, 6, settings)
                checked(asked, groups)
                cut += [one.finish == "length" for group in groups.values() for one in group]
                found.update(client.metrics())  # of this turn alone
                hung = found["sampler/stalled"] >= 2 and found["sampler/aborted"] >= 20
                if turn and (hung or freezing is None):
                    break
            if freezing is not None:
                freezing.cancel()
            assert found["sampler/slow"] == 0
            if "hangs" in faults:
                assert hung, "what hung went on elsewhere"
            else:
                assert found["sampler/stalled"] == found["sampler/set_aside"] == 0, "a slow server is a healthy one"
        return cut

    cut = asyncio.run(run())
    want = share_of_cut_answers(asked)
    assert 0.1 < want < 0.5
    assert abs(np.mean(cut) - want) < 4 * np.sqrt(want * (1 - want) / len(cut))


def test_a_hung_server_that_answers_nothing_is_left_and_holds_no_request(start, prefixes, monkeypatch):
    monkeypatch.setattr(fleet, "_CUT_S", 0.2)

    async def run() -> None:
        servers = [FakeVllm(step_s=0.001) for _ in range(2)]
        async with start(servers, straggler_s=0.3, request_s=60.0) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 2)
            servers[1].slow["*"] = 60.0
            begin = time.monotonic()
            found = await collect(client, prefixes, 2)
            checked(prefixes, found)
            assert time.monotonic() - begin < 10
            assert client.metrics()["sampler/stalled"] == 1
            assert client._fleet is not None
            await until(lambda: not any(s.load for s in client._fleet.servers))

    asyncio.run(run())


def test_a_caller_that_gives_up_on_a_hung_server_leaves_no_load_behind(start, prefixes):
    async def run() -> None:
        servers = [FakeVllm(step_s=0.001) for _ in range(2)]
        async with start(servers) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            for server in servers:
                server.frozen = True
            asked = asyncio.create_task(collect(client, prefixes, 1))
            await until(lambda: all(server.active for server in servers))
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            assert client._fleet is not None
            await until(lambda: not any(s.load for s in client._fleet.servers))

    asyncio.run(run())


def test_a_server_that_counts_no_tokens_is_told_of_once_and_never_called_hung(start, prefixes, caplog):
    async def run() -> None:
        server = FakeVllm(step_s=0.05, counts_tokens=False)
        async with start([server], straggler_s=0.05) as client:
            await client.publish({}, 0)
            for _ in range(2):  # each step takes the counters
                checked(prefixes, await collect(client, prefixes, 2))
                found = client.metrics()
                assert found["sampler/uncounted"] > 1 and found["sampler/stalled"] == found["sampler/set_aside"] == 0

    asyncio.run(run())
    assert caplog.text.count("does not count its tokens") == 1


def test_progress_is_of_a_server_that_has_drawn_before_and_then_draws_nothing(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = Progress()
    steps = [(0, 5.0, False), (50, 5.0, False), (60, 6.0, False), (63, 6.0, False), (66, 6.0, False), (69, 6.0, False),
        (71, 6.0, True), (72, 7.0, False), (90, 7.0, False)]  # fmt: skip
    for at, tokens, stalled in steps:
        clock[0] = 100.0 + at
        assert progress.stalled(tokens, 10.0) is stalled, at
    progress.rest()
    clock[0] = 300.0
    assert progress.stalled(7.0, 10.0) is False, "nothing was in flight meanwhile"
