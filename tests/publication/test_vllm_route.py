"""Our route in vLLM's server: what it asks of the engine and answers, with a stand-in for the engine and vLLM's types."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from jaxrl_llm.publication.vllm_route import ROUTE, TokenRoute


class SamplingParams:
    flat_logprobs = False
    output_kind = 0

    def __init__(self, **given):
        if given.get("n", 1) < 1:
            raise ValueError("n must be at least 1")
        self.given = given


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    """The three names of vLLM that the route imports when it is asked."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.inputs", "vllm.sampling_params")}
    modules["vllm"].SamplingParams = SamplingParams
    modules["vllm.inputs"].TokensPrompt = dict
    modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def flat(logprobs: list[float]) -> SimpleNamespace:
    """vLLM's container of lists, the most likely entry of each position after the one that was drawn."""
    return SimpleNamespace(
        start_indices=list(range(0, 2 * len(logprobs), 2)), logprobs=[y for x in logprobs for y in (x, -0.1)]
    )


def sample(index: int, tokens: list[int], logprobs, finish: str = "length", **more) -> SimpleNamespace:
    return SimpleNamespace(index=index, token_ids=tokens, logprobs=logprobs, finish_reason=finish, **more)


class Engine:
    """Draws what it is told, after `seconds`."""

    def __init__(self, *outputs, seconds: float = 0.0):
        self.outputs, self.seconds, self.asked, self.ended = outputs, seconds, [], False

    async def generate(self, prompt, settings, name):
        self.asked.append((prompt, settings, name))
        try:
            await asyncio.sleep(self.seconds)
            yield SimpleNamespace(outputs=list(self.outputs))
        finally:
            self.ended = True


def application(engine: Engine) -> FastAPI:
    app = FastAPI()
    app.state.engine_client = engine
    app.add_middleware(TokenRoute)
    return app


def post(engine: Engine, content: object) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=application(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return await client.post(ROUTE, json=content)

    return asyncio.run(run())


def test_tokens_and_log_probs_come_as_lists_from_either_container_of_vllm():
    dicts = [
        {7: SimpleNamespace(logprob=-1.5), 3: SimpleNamespace(logprob=-0.2)},
        {8: SimpleNamespace(logprob=float("-inf"))},
    ]
    span = SimpleNamespace(version="4", start=0, end=1)
    engine = Engine(sample(0, [5], flat([-0.25]), "stop", weight_versions=[span]), sample(1, [7, 8], dicts))
    asked = {"token_ids": [1, 2], "cache_salt": "v4", "sampling_params": {"n": 2, "max_tokens": 9, "logprobs": 0}}
    answer = post(engine, asked | {"model": "policy", "stream": False})
    assert answer.status_code == 200
    first, second = answer.json()["choices"]
    assert first == {
        "index": 0, "token_ids": [5], "logprobs": [-0.25], "finish_reason": "stop",
        "weight_versions": [{"version": "4", "start": 0, "end": 1}],
    }  # fmt: skip
    assert second["logprobs"] == [-1.5, -9999.0] and second["weight_versions"] is None
    ((prompt, settings, _),) = engine.asked
    assert prompt == {"prompt_token_ids": [1, 2], "cache_salt": "v4"} and settings.given == asked["sampling_params"]
    assert settings.output_kind == 2 and settings.flat_logprobs


@pytest.mark.parametrize("content", [{}, {"token_ids": [1]}, {"token_ids": [1], "sampling_params": {"n": 0}}, [1]])
def test_a_request_that_is_none_is_refused(content):
    answer = post(Engine(), content)
    assert answer.status_code == 400 and answer.json()["error"]


def test_a_request_whose_client_goes_away_is_ended():
    engine = Engine(seconds=60.0)

    async def run() -> None:
        sent = iter(
            [
                {"type": "http.request", "body": b'{"token_ids": [1], "sampling_params": {}}'},
                {"type": "http.disconnect"},
            ]
        )

        async def receive():
            return next(sent)

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": [], "query_string": b"", "root_path": ""}
        await asyncio.wait_for(application(engine)(scope, receive, send), timeout=5)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert engine.asked and engine.ended


def test_other_paths_pass():
    app = application(Engine())

    @app.get("/health")
    def health() -> str:
        return "well"

    async def run() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://vllm") as client:
            return (await client.get("/health")).json()

    assert asyncio.run(run()) == "well"


def test_the_route_draws_by_the_adapters_that_a_request_names_and_knows_no_others():
    told = []

    class WithAdapters(Engine):
        async def generate(self, prompt, settings, name, lora_request=None):
            told.append(lora_request)
            async for found in super().generate(prompt, settings, name):
                yield found

    engine = WithAdapters(sample(0, [7], flat([-1.0])))
    app = application(engine)
    app.state.openai_serving_models = SimpleNamespace(
        lora_requests={"ab-3-1": "third"}, is_base_model=lambda name: name == "policy"
    )

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            asked = {"token_ids": [1], "sampling_params": {"n": 1}}
            names = ("policy", "ab-3-1", "ab-2-1", None)
            answers = [await client.post(ROUTE, json=asked | ({"model": m} if m else {})) for m in names]
            assert "no model 'ab-2-1' is served here" in answers[2].text
            return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [200, 200, 404, 200]
    assert told == [None, "third", None]
