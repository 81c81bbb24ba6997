"""An additional route in vLLM's HTTP server, by its option `--middleware`, that returns token ids and log-probs as two lists (no jax).

    POST /v1/jaxrl_llm/generate {"model": "...", "token_ids": [...], "sampling_params": {...}, "cache_salt": "..."}
    -> {"choices": [{"index", "token_ids", "logprobs", "finish_reason", "weight_versions"}]}

vLLM's own route makes two validated objects of each token's log-prob, in the thread that also passes the tokens on: 32 microseconds a
token, several times the server's other work for one. Like all paths under /v1, this one requires vLLM's API key where it has one.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

ROUTE = "/v1/jaxrl_llm/generate"
LEAVING = "this server leaves: ask another one"  # the answer of the proxy before a server from SIGTERM on until it ends
_LEAST = -9999.0  # JSON has no -inf

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TokenRoute:
    """A middleware that adds the route to its application, and passes all requests on."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self._added = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._added and "app" in scope:
            scope["app"].add_route(ROUTE, generate, methods=["POST"])
            self._added = True
        await self.app(scope, receive, send)


async def generate(request: Any) -> Any:
    """Answers when all n samples are finished; cancels them where the client goes away first."""
    from starlette.responses import JSONResponse, Response

    try:
        content = await request.json()
        prompt, settings = _asked(content)
        known, beside = _adapters(request.app.state, content.get("model"))
        if not known:
            return JSONResponse({"error": f"no model {content['model']!r} is served here"}, status_code=404)
        drawing = asyncio.ensure_future(_drawn(request.app.state.engine_client, prompt, settings, beside))
        left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((drawing, left), return_when=asyncio.FIRST_COMPLETED)
            if not drawing.done():
                return Response(status_code=499)  # the client is gone
            choices = [_said(one) for one in drawing.result().outputs]
        finally:
            drawing.cancel()
            left.cancel()
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        return JSONResponse({"error": f"{type(wrong).__name__}: {wrong}"}, status_code=400)
    return Response(json.dumps({"choices": choices}), media_type="application/json")


def _asked(content: Any) -> tuple[Any, Any]:
    """Returns vLLM's prompt and sampling parameters of a request."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    prompt = TokensPrompt(prompt_token_ids=content["token_ids"])
    if content.get("cache_salt"):
        prompt["cache_salt"] = content["cache_salt"]
    settings = SamplingParams(**content["sampling_params"])
    settings.output_kind = RequestOutputKind.FINAL_ONLY
    if hasattr(settings, "flat_logprobs"):  # lists in place of an object for each token
        settings.flat_logprobs = True
    return prompt, settings


def _adapters(state: Any, model: str | None) -> tuple[bool, dict[str, Any]]:
    """Returns whether a model of that name is served, and the engine's arguments for the adapters of that name."""
    served = getattr(state, "openai_serving_models", None)
    if served is None or not model or served.is_base_model(model):
        return True, {}
    found = served.lora_requests.get(model)
    return found is not None, {"lora_request": found}


async def _drawn(engine: Any, prompt: Any, settings: Any, beside: dict[str, Any]) -> Any:
    """Generates a request and returns its final output."""
    answers = [answer async for answer in engine.generate(prompt, settings, f"jaxrl-{uuid.uuid4().hex}", **beside)]
    return answers[-1]


async def _left(request: Any) -> None:
    """Returns when the client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _said(one: Any) -> dict[str, Any]:
    """Returns a sample in the form of the route."""
    tokens, spans = list(one.token_ids), getattr(one, "weight_versions", None)
    return {
        "index": one.index, "token_ids": tokens, "logprobs": _logprobs(one.logprobs, tokens),
        "finish_reason": one.finish_reason,
        "weight_versions": spans and [{"version": s.version, "start": s.start, "end": s.end} for s in spans],
    }  # fmt: skip


def _logprobs(found: Any, tokens: list[int]) -> list[float]:
    """Returns the log-probs of the tokens that were drawn, from one of vLLM's two containers."""
    if hasattr(found, "start_indices"):  # at each position the drawn token comes first
        each = [found.logprobs[i] for i in found.start_indices]
    else:
        each = [at[token].logprob for at, token in zip(found or (), tokens)]
    return [max(x, _LEAST) for x in each]
