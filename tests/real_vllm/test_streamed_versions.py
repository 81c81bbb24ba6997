"""Where a server does not name the versions of its tokens, the learner's own client tells them by when they arrive."""

import asyncio
import time

import numpy as np
import pytest
from serving import STEP_S
from test_updates_in_flight import MAX_TOKENS, NEW, OLD, PROMPTS, TOLERANCE, generated

from jaxrl_llm.samplers.servers import server_update
from jaxrl_llm.samplers.servers.answers import Ask, Piece
from jaxrl_llm.samplers.vllm.server_api import VllmHttp

SAMPLING = {
    "n": 1,
    "max_tokens": MAX_TOKENS,
    "temperature": 1.0,
    "logprobs": 0,
    "detokenize": False,
    "ignore_eos": True,
}


class Unnamed(VllmHttp):
    """A connection that knows nothing of what the server says of versions."""

    @property
    def spans(self) -> bool:
        return False

    def _versions(self, spans, count):
        return super()._versions(None, count)


async def updated_in_flight(served, published: list[str], inflight: str) -> list[Piece]:
    """What was drawn from PROMPTS while the weights went from OLD to NEW by the fleet's own steps."""
    http = Unnamed(url=served.url)
    server = server_update.Server(http=http, ready=True)
    pieces = [Piece() for _ in PROMPTS]
    try:
        await http.open()
        for version in (OLD, NEW):
            wanted = server_update.Published(path=published[version], version=version)
            await server_update.stage(server, wanted)
            if version == NEW:
                stream = server_update.streamed(server, inflight)
                asks = [Ask(tokens=prompt, sampling=SAMPLING, stream=stream) for prompt in PROMPTS]
                server.flights |= {
                    asyncio.create_task(http.generate(a, [p])) for a, p in zip(asks, pieces, strict=True)
                }
                for task in server.flights:
                    task.add_done_callback(server.flights.discard)
                flights = list(server.flights)
                await under_way(served, generated(served) + 16)
            await server_update.swap(server, wanted, inflight, STEP_S)
        await asyncio.gather(*flights)
    finally:
        await http.close()
    return pieces


async def under_way(served, tokens: float) -> None:
    """Returns when the server has drawn so many tokens in all."""
    until = time.monotonic() + STEP_S
    while await asyncio.to_thread(generated, served) < tokens:
        assert time.monotonic() < until, "nothing is generated"
        await asyncio.sleep(0.002)


def crossed(pieces: list[Piece], references, inflight: str) -> bool:
    """Whether a request was in flight at the update; each token's log-prob is compared with that of its version."""
    crossing = 0
    for prompt, piece in zip(PROMPTS, pieces, strict=True):
        old = piece.versions.count(OLD)
        assert piece.versions == [OLD] * old + [NEW] * (len(piece.tokens) - old)
        assert (piece.finish, len(piece.tokens) < MAX_TOKENS) in (("length", False), ("abort", True))
        expected = {v: references(v).logprobs(prompt + piece.tokens)[len(prompt) - 1 :] for v in (OLD, NEW)}
        for version, place in ((OLD, slice(0, old)), (NEW, slice(old, None))):
            gap = np.abs(np.array(piece.logprobs)[place] - expected[version][place])
            assert gap.max(initial=0.0) < TOLERANCE
        crossing += 0 < old < MAX_TOKENS
        assert inflight == "recompute" or old == len(piece.tokens)
    return crossing > 0


@pytest.mark.parametrize("inflight", ["recompute", "abort_resume", "wait"])
def test_each_token_has_the_log_prob_of_the_version_it_is_given(server, published, references, inflight):
    attempts = 1 if inflight == "wait" else 5  # a server's first stream may be over before it says that it began
    found = (
        crossed(asyncio.run(updated_in_flight(server, published, inflight)), references, inflight)
        for _ in range(attempts)
    )
    assert any(found) or inflight == "wait", "no request was in flight"
