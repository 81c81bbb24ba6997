"""One vLLM server over HTTP: token ids in, token ids with log-probs out, and the steps of a weight update (aiohttp).

Requests go to our own route (`vllm_route`) where the server has it, else to `/inference/v1/generate`, else to `/v1/completions`;
streams and scores do not use the first. Versions of tokens are the server's own spans where it gives them (vLLM 0.32), else `version`
of this object when the tokens arrive. Neither is trusted: `marks` checks that the server still holds the committed weights.
"""

import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxrl_llm.publication import vllm_route
from jaxrl_llm.samplers.routes import FLAG, START, Recording
from jaxrl_llm.samplers.servers.answers import Ask, Piece, Refused, ServerFault, Unreached
from jaxrl_llm.samplers.servers.server_http import CONNECT_S, TEXT, Ranks, Scores, ServerHttp, timeout
from jaxrl_llm.samplers.vllm import adapters
from jaxrl_llm.samplers.vllm.adapters import LOAD

_log = logging.getLogger(__name__)

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_FINAL_ONLY = 2  # vLLM's RequestOutputKind.FINAL_ONLY


@dataclass(eq=False, kw_only=True)
class VllmHttp(ServerHttp):
    """A client of a vLLM server, or of a proxy before it.

    Attributes:
      model: the policy's name at the server.
      proxied: whether `url` is a proxy of this package, which offers only what is needed here.
      release: vLLM's version as (major, minor); (0, 0) before `open`.
      route: vLLM's own route for generations; found by `open`.
      tokens: this package's own route.
      lists: whether the server has that route; found by `open`.
      recording: the shape of the samples' records of experts; None asks for none.
      unrecorded: number of samples without a valid record since the last call of `take_unrecorded`.
    """

    kind: ClassVar[str] = "vLLM"
    settings: ClassVar[str] = "vllm.VllmSampler"
    counts: ClassVar[tuple[str, ...]] = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")

    model: str = "policy"
    proxied: bool = False
    release: tuple[int, int] = (0, 0)
    route: str = GENERATE
    tokens: str = vllm_route.ROUTE
    lists: bool = False
    recording: Recording | None = None
    unrecorded: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._doubted = False  # whether an invalid record was logged

    async def open(self) -> None:
        try:
            health = await self._call("GET", "/health", limit_s=CONNECT_S)
        except Refused as refused:
            if refused.status not in (401, 403):
                raise
            raise Refused(
                f"{refused}: set vllm.VllmSampler.api_key_variable to the environment variable that holds the server's key "
                "or the proxy's token, and VllmSampler.proxied = True for a proxy",
                refused.status,
            ) from refused
        if self.proxied:
            if not health:
                raise Refused(
                    f"{self.url} is no proxy of ours, it may be vLLM itself: leave out VllmSampler.proxied = True"
                )
            self.release, self.route, self.tokens = release(self.url, health), "/generate", "/tokens"
            self.lists = await self._refusal(self.tokens) == 400
            return
        self.release = release(self.url, await self._call("GET", "/version", limit_s=CONNECT_S))
        if self.adapters and await self._refusal(LOAD) in (404, 405):
            raise Refused(
                f"{self.url} loads no adapters while it runs: start it with --enable-lora and the environment variable "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or set vllm.VllmSampler.adapters = False"
            )
        if not self.adapters and await self._refusal("/collective_rpc") in (404, 405):
            raise Refused(
                f"{self.url} runs without its development endpoints, through which weights are updated: start it with the "
                "environment variable VLLM_SERVER_DEV_MODE=1 (on loopback alone: an API key does not protect them)"
            )
        self.route = COMPLETIONS if await self._refusal(GENERATE) in (403, 404, 405) else GENERATE
        self.lists = await self._refusal(self.tokens) == 400
        if self.recording is not None:
            self.route, self.lists = COMPLETIONS, False  # the one route that has returned experts since vLLM 0.21
            await self._check_record(self.recording)

    async def _check_record(self, recording: Recording) -> None:
        """Raises Refused where the server does not record experts as it should, which a sample of two tokens shows."""
        sampling = {
            "n": 1, "max_tokens": 2, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, "stop_token_ids": [],
        }  # fmt: skip
        ask = Ask(tokens=[0, 1], sampling=sampling)
        answer = json.loads(await self._call("POST", self.route, self._body(ask), limit_s=self.request_s))
        try:
            recording.read(answer["choices"][0], 0, 3)
        except (ValueError, KeyError, IndexError, TypeError) as wrong:
            raise Refused(
                f"{self.url} does not record experts as the run wants them ({wrong}): start it with {FLAG}, or set "
                "vllm.VllmSampler.record_routes = False"
            ) from wrong

    async def _refusal(self, route: str) -> int:
        """Returns the status with which an empty request is refused: 404 where the route does not exist, 400 or 422 where it does."""
        try:
            await self._call("POST", route, {}, limit_s=CONNECT_S)
        except Refused as refused:
            return refused.status
        return 200

    @property
    def spans(self) -> bool:
        return self.release >= (0, 32)

    # -- generation ----------------------------------------------------------------------------------------------------

    async def generate(self, ask: Ask, pieces: list[Piece]) -> None:
        body, route = self._body(ask), self.tokens if self._by_lists(ask) else self.route
        name, version = self.adapter, self.version
        self.flying[name] += 1
        try:
            if ask.stream:
                async for choice in self._events(body):
                    self._take(choice, pieces, ask, version)
                for piece in pieces:  # before 0.32 an aborted stream ends without a reason
                    piece.finish = piece.finish or "abort"
            else:
                answer = json.loads(await self._call("POST", route, body, limit_s=self.request_s))
                for choice in answer["choices"]:
                    self._take(choice, pieces, ask, version)
                if any(piece.finish is None for piece in pieces):
                    raise ValueError(f"{len(answer['choices'])} samples of the {len(pieces)} that were asked for")
        except (KeyError, IndexError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as wrong:
            raise ServerFault(f"{self.url} answered something else than samples: {wrong!r}") from wrong
        except ValueError as wrong:
            if isinstance(wrong, Refused) and not (self.adapters and wrong.status == 404):
                raise
            raise ServerFault(f"{self.url} answered something else than was asked for: {wrong}") from wrong
        finally:
            self.flying[name] -= 1

    async def score(self, tokens: Sequence[int], likely: Sequence[int], listed: int, adapter: str = "") -> Scores:
        sampling = {"n": 1, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": listed, "detokenize": False}
        body = self._body(Ask(tokens=tokens, sampling=sampling))
        body |= {"model": adapter, "cache_salt": adapter} if adapter else {}
        said = await self._call("POST", self.route, body, limit_s=self.control_s)
        try:
            answer = json.loads(said)
            found = (answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"])[1:]
            text = [at[str(token)]["logprob"] for at, token in zip(found, list(tokens)[1:], strict=True)]
            absent = {"logprob": -np.inf}
            favourites = [at.get(str(token), absent)["logprob"] for at, token in zip(found, likely, strict=True)]
            return np.asarray(text, np.float64), np.asarray(favourites, np.float64)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError) as wrong:
            raise ServerFault(f"{self.url} gave no log-probs of a prompt: {wrong!r}") from wrong

    def _by_lists(self, ask: Ask) -> bool:
        """Returns whether this package's own route answers the request."""
        return self.lists and not ask.stream and "prompt_logprobs" not in ask.sampling

    def _body(self, ask: Ask) -> dict[str, Any]:
        """Returns the request's body in the form of its route."""
        common: dict[str, Any] = {
            "model": self.adapter or self.model,
            "stream": ask.stream,
            "cache_salt": f"v{self.version}",
        }
        tokens = [int(token) for token in ask.tokens]
        if self.route != COMPLETIONS or self._by_lists(ask):
            # Unless told otherwise, vLLM before 0.32 answers with what the last step of the n samples changed.
            sampling = dict(ask.sampling) if ask.stream else {**ask.sampling, "output_kind": _FINAL_ONLY}
            return {**common, "request_id": uuid.uuid4().hex, "token_ids": tokens, "sampling_params": sampling}
        sampling = {name: value for name, value in ask.sampling.items() if name != "detokenize"}
        if self.recording is not None and ask.routed and self.release >= (0, 22):
            sampling[START] = ask.routed
        return {**common, "prompt": tokens, "return_token_ids": True, **sampling}

    def _take(self, choice: Mapping[str, Any], pieces: list[Piece], ask: Ask, asked: int) -> None:
        """Adds the tokens of one answer, or one event of a stream, to a sample; with adapters their version is `asked`."""
        self.arrivals += 1
        piece = pieces[choice["index"]]
        said = {**choice, "weight_versions": None} if self.adapters else choice  # the server's are its base's
        piece.take(said, ask, self.vocabulary, asked if self.adapters else self.version)
        if self.recording is not None and piece.finish is not None and piece.tokens:
            self._record(self.recording, choice, piece, ask)

    def take_unrecorded(self) -> int:
        count, self.unrecorded = self.unrecorded, 0
        return count

    def _record(self, recording: Recording, choice: Mapping[str, Any], piece: Piece, ask: Ask) -> None:
        """Reads the record of a sample; an invalid one is left out, counted, and logged the first time."""
        try:
            piece.routes = recording.read(choice, ask.routed, len(ask.tokens) + len(piece.tokens) - 1)
        except ValueError as wrong:
            self.unrecorded += 1
            if not self._doubted:
                self._doubted = True
                _log.warning(
                    "%s gave a sample without a record of its experts that could be believed: %s; its tokens go to the experts that the "
                    "learner chooses (sampler/unrecorded counts such samples)", self.url, wrong,
                )  # fmt: skip

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Yields the choices of a stream of server-sent events."""
        with self._faults(self.route, self.request_s):
            async with self.session.post(self.url + self.route, json=body, timeout=timeout(self.request_s)) as answer:
                await self._good(answer, "POST", self.route)
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "choices" not in event:
                        raise ServerFault(f"{self.url} broke a stream off: {str(event)[:TEXT]}")
                    for choice in event["choices"]:
                        yield choice
        raise Unreached(f"{self.url} closed a stream before its end")

    # -- the steps of an update ----------------------------------------------------------------------------------------

    async def stage(self, path: str, version: int) -> None:
        await self._step("stage", "/stage", path=path, version=version)

    async def stage_status(self) -> Ranks:
        return await self._step("stage_status", "/stage_status")

    async def commit(self, version: int, mark: str) -> Ranks:
        return await self._step("commit", "/commit", version=version, mark=mark)

    async def commit_memory(self, version: int, mark: str, memory: str) -> Ranks:
        return await self._step("commit_ipc", "/commit_ipc", version=version, mark=mark, memory=memory)

    async def pause(self, mode: str, *, clear_cache: bool, limit_s: float | None = None) -> None:
        query = f"mode={mode}&clear_cache={str(clear_cache).lower()}"
        await self._call("POST", f"/pause?{query}", limit_s=limit_s or self.control_s)

    async def resume(self) -> None:
        await self._call("POST", "/resume", limit_s=self.control_s)

    async def label(self, version: int) -> None:
        # vLLM stores one since 0.30.
        if not self.proxied and self.release >= (0, 30):
            await self._call("POST", "/update_weight_version", {"new_version": str(version)}, limit_s=self.control_s)

    async def _step(self, method: str, route: str, **arguments: Any) -> Ranks:
        """Calls a method of the worker extension on every rank, directly or by the proxy's route of that name."""
        try:
            if self.proxied:
                text = await self._call("POST", route, arguments, limit_s=self.control_s)
            else:
                # Without vLLM's own "timeout", since the ranks would read a late answer as that of the next call.
                body = {"method": method, "kwargs": {n: str(x) for n, x in arguments.items()}}
                text = await self._call("POST", "/collective_rpc", body, limit_s=self.control_s)
        except ServerFault as fault:
            if "is not implemented" not in str(fault):
                raise
            raise Refused(
                f"{self.url} runs without the extension that loads published weights: start it with "
                f"--worker-extension-cls jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension ({fault})"
            ) from fault
        try:
            ranks = [dict(result or {}) for result in json.loads(text or '{"results": []}')["results"]]
            return [rank | {n: int(rank[n]) for n in ("version",) if n in rank} for rank in ranks]
        except (KeyError, TypeError, ValueError, RecursionError) as wrong:
            raise ServerFault(f"{self.url} answered {method} with {text[:TEXT]!r}") from wrong

    # -- adapters ------------------------------------------------------------------------------------------------------

    async def load_adapters(self, name: str, path: str) -> None:
        await adapters.load(self, name, path)

    async def unload_idle(self) -> None:
        await adapters.unload_idle(self)

    async def unload_all(self, adapter: str, limit_s: float) -> None:
        await adapters.unload_all(self, adapter, limit_s)

    def versions_asked(self) -> set[int]:
        return {adapters.version_named(name) for name, flights in self.flying.items() if flights and name}


def release(url: str, text: str) -> tuple[int, int]:
    """Reads (major, minor) from a server's /version; raises Refused where it is not vLLM."""
    try:
        major, minor = str(json.loads(text)["version"]).split(".")[:2]
        return int(major), int(minor)
    except (KeyError, TypeError, ValueError, RecursionError) as wrong:
        raise Refused(f"{url} is no vLLM server: its /version says {text[:400]!r}") from wrong
