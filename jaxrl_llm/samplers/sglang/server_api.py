"""One SGLang server over HTTP: token ids in, token ids with log-probs out, and the steps of a weight update (aiohttp).

SGLang reads a version from a folder while it is paused (`/update_weights_from_disk`), so that nothing is staged before. The mark of a
commit is its `weight_version`, which a restarted server, or one that another learner updates, does not have.

Each sample is a request of its own: SGLang's parallel sampling of one prompt first prefills it alone, and loses all samples where one is
aborted. Its prefix cache shares the prompt. Log-probs are those after temperature and penalties; where top_k, top_p or min_p cut the
distribution off, SGLang renormalizes them on request.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxrl_llm.samplers.servers.answers import Ask, Piece, Refused, ServerFault, TooSlow
from jaxrl_llm.samplers.servers.server_http import CONNECT_S, TEXT, Ranks, Scores, ServerHttp

GENERATE, MODEL, SERVER = "/generate", "/model_info", "/server_info"
UPDATE, FLUSH = "/update_weights_from_disk", "/flush_cache"
PAUSE, RESUME, ABORT = "/pause_generation", "/continue_generation", "/abort_request"
MARGIN = 8  # tokens that a server's context is longer than its texts: SGLang keeps six of it free
_ABORTED = "was aborted"  # of a request that had not begun
_POLL_S, _AGAIN_S = 0.02, 0.2  # seconds between looks at samples that end, and between aborts of those that came late
_IDLE_S = 5.0  # seconds that a paused server has to end what its clients left


@dataclass(eq=False, kw_only=True)
class SglangHttp(ServerHttp):
    """A client of an SGLang server.

    Attributes:
      length: most tokens of a prefix and its completion together; 0 leaves the server's context unchecked.
      update_s: most seconds of reading a version, in which the server is paused.
      release: SGLang's version; empty before `open`.
      samples: number of samples that are being drawn.
    """

    kind: ClassVar[str] = "SGLang"
    settings: ClassVar[str] = "sglang.SglangSampler"
    counts: ClassVar[tuple[str, ...]] = ("sglang:realtime_tokens_total",)

    length: int = 0
    update_s: float = 300.0
    release: str = ""
    samples: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._staged = ("", -1)

    async def open(self) -> None:
        info = await self._json("GET", SERVER, limit_s=CONNECT_S)
        try:
            self.release, room = str(info["version"]), int(info.get("max_req_input_len", self.length))
            await self._mark()
        except (KeyError, TypeError, ValueError) as wrong:
            raise Refused(f"{self.url} is no SGLang server: its {SERVER} says {str(info)[:TEXT]!r}") from wrong
        if room < self.length:
            raise Refused(
                f"{self.url} takes prompts of {room - 1} tokens at most, and the run's texts have up to {self.length}: start it with "
                f"--context-length {self.length + MARGIN} and, beyond the model's own, SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
            )

    # -- generation ----------------------------------------------------------------------------------------------------

    async def generate(self, ask: Ask, pieces: list[Piece]) -> None:
        if ask.sampling["repetition_penalty"] != 1:
            raise Refused(
                "SGLang penalizes the tokens of a response alone, and not those of its prompt: set SamplingParams.repetition_penalty = 1 "
                f"(got {ask.sampling['repetition_penalty']:g})"
            )
        self.samples += len(pieces)
        try:
            drawn = (self._sample(ask, piece) for piece in pieces)
            for error in await asyncio.gather(*drawn, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error
        finally:
            self.samples -= len(pieces)

    async def _sample(self, ask: Ask, piece: Piece) -> None:
        """Fills one piece."""
        try:
            answer = await self._json("POST", GENERATE, self._body(ask), limit_s=self.request_s)
        except Refused as refused:
            if _ABORTED not in str(refused):
                raise
            piece.finish = "abort"
            return
        self.arrivals += 1
        try:
            piece.take(_choice(answer, ask), ask, self.vocabulary, self.version)
        except (KeyError, IndexError, TypeError, AttributeError) as wrong:
            raise ServerFault(f"{self.url} answered something else than a sample: {wrong!r}") from wrong
        except ValueError as wrong:
            raise ServerFault(f"{self.url} answered something else than was asked for: {wrong}") from wrong

    def _body(self, ask: Ask) -> dict[str, Any]:
        """Returns the request for one of the samples."""
        given, cut = ask.sampling, _cut(ask)
        sampling = {
            name: given[name] for name in ("temperature", "top_p", "min_p", "repetition_penalty", "stop_token_ids")
        }
        sampling |= {
            "max_new_tokens": given["max_tokens"], "top_k": given["top_k"] or (self.vocabulary if cut else -1), "skip_special_tokens": False,
            "ignore_eos": not given["stop_token_ids"],  # which ignores stop_token_ids too
            "no_stop_trim": True,
        }  # fmt: skip
        if given.get("stop"):
            sampling["stop"] = given["stop"]
        return {
            "input_ids": [int(token) for token in ask.tokens], "sampling_params": sampling, "return_logprob": True,
            "logprob_start_len": -1, "return_sampling_mask": cut, "stream": False,
        }  # fmt: skip

    async def score(self, tokens: Sequence[int], likely: Sequence[int], listed: int, adapter: str = "") -> Scores:
        body = {
            "input_ids": [int(token) for token in tokens], "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": listed, "stream": False,
        }  # fmt: skip
        found = await self._json("POST", GENERATE, body, limit_s=self.control_s)
        try:
            said = found["meta_info"]
            text = [row[0] for row in said["input_token_logprobs"][1:]]
            lists = [{row[1]: row[0] for row in rows} for rows in said["input_top_logprobs"][1:]]
            if not len(text) == len(lists) == len(tokens) - 1:
                raise ValueError(f"{len(text)} log-probs and {len(lists)} lists for {len(tokens)} tokens")
            favourites = [at.get(int(token), -np.inf) for at, token in zip(lists, likely, strict=True)]
            return np.asarray(text, np.float64), np.asarray(favourites, np.float64)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as wrong:
            raise ServerFault(f"{self.url} gave no log-probs of a prompt: {wrong!r}") from wrong

    # -- the steps of an update ----------------------------------------------------------------------------------------

    async def stage(self, path: str, version: int) -> None:
        self._staged = (path, version)

    async def stage_status(self) -> Ranks:
        return [{"state": "staged", "version": self._staged[1], "mark": await self._mark()}]

    async def commit(self, version: int, mark: str) -> Ranks:
        path, was = self._staged[0], await self._mark()
        body = {"model_path": path, "load_format": "safetensors", "weight_version": mark, "flush_cache": True}
        try:
            said = await self._json("POST", UPDATE, body, limit_s=self.update_s)
        except Refused as refused:
            raise ServerFault(
                f"{refused}: does the server see the folder (sglang.SglangSampler.publication)?"
            ) from refused
        held = version if said.get("success") else -1
        return [
            {"version": held, "error": "" if held == version else str(said), "was": was, "checked": 0, "unchecked": 0}
        ]

    async def commit_memory(self, version: int, mark: str, memory: str) -> Ranks:
        raise Refused(f"{self.url} is an SGLang server, which copies no weights out of the learner's memory")

    async def pause(self, mode: str, *, clear_cache: bool, limit_s: float | None = None) -> None:
        """Lets requests in flight end ("wait") or ends them ("abort"), and stops generation; the cache is dropped by the commit.

        SGLang's own abort looks for the ends once a second, so that they are waited for here.
        """
        if mode not in ("wait", "abort"):
            raise ValueError(f"an SGLang server is paused by 'wait' or 'abort' (got {mode!r})")
        limit_s = limit_s or self.control_s
        abort = mode == "abort"
        if not await self._ended(min(CONNECT_S, limit_s) if abort else limit_s, abort=abort) and not abort:
            raise TooSlow(f"{self.url} still draws {self.samples} samples after {limit_s:g} s")
        await self._call("POST", PAUSE, {"mode": "abort"}, limit_s=limit_s)
        try:  # requests whose clients are gone may still be drawn, and an update in their midst ends the server
            await self._call("POST", f"{FLUSH}?timeout={_IDLE_S:g}", limit_s=limit_s + _IDLE_S)
        except Refused as refused:
            raise ServerFault(f"{refused}: it still draws what nobody waits for") from refused

    async def _ended(self, limit_s: float, *, abort: bool) -> bool:
        """Waits until no sample is being drawn, with `abort` as it has them end; returns whether that is so."""
        limit, again = time.monotonic() + limit_s, 0.0
        while self.samples and (now := time.monotonic()) < limit:
            if abort and now >= again:  # a request that was still read at the last abort has begun since
                await self._call("POST", ABORT, {"abort_all": True}, limit_s=limit_s)
                again = now + _AGAIN_S
            await asyncio.sleep(_POLL_S)
        return not self.samples

    async def resume(self) -> None:
        await self._call("POST", RESUME, {"torch_empty_cache": False}, limit_s=self.control_s)

    async def _mark(self) -> str:
        """Returns the mark of the weights that the server holds."""
        return str((await self._json("GET", MODEL, limit_s=self.control_s))["weight_version"])

    async def _json(self, verb: str, route: str, body: Any = None, *, limit_s: float) -> Any:
        """Sends a request and returns what its answer holds."""
        text = await self._call(verb, route, body, limit_s=limit_s)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as wrong:
            raise ServerFault(f"{self.url} answered {route} with {text[:TEXT]!r}") from wrong


def _cut(ask: Ask) -> bool:
    """Returns whether tokens are drawn from a part of the distribution, of which SGLang gives log-probs on request."""
    given = ask.sampling
    return given["temperature"] > 0 and (given["top_k"] > 0 or given["top_p"] < 1 or given["min_p"] > 0)


def _choice(answer: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    """Returns an answer in the form that `Piece.take` reads."""
    tokens, said = list(answer["output_ids"]), answer["meta_info"]
    drawn, finish = said.get("output_token_logprobs") or [], said["finish_reason"]["type"]
    if [row[1] for row in drawn] != tokens:
        raise ValueError(f"log-probs of {len(drawn)} other tokens than the {len(tokens)} that were drawn")
    logprobs = [row[0] for row in drawn]
    if _cut(ask):
        logprobs = said.get("output_token_sampling_logprobs") or []
    if (
        finish == "abort" and not logprobs
    ):  # of one cut while it waited to go on, SGLang has those of the whole distribution alone
        tokens = []
    stops, last = ask.sampling["stop_token_ids"], tokens[-1] if tokens else None
    if finish == "abort" and last in stops:
        finish = "stop"  # cut in the step that drew it
    elif finish == "stop" and said["finish_reason"].get("matched") == last not in stops:
        finish = "abort"  # at an end of the model's own, which is none of the run's
    return {"token_ids": tokens, "logprobs": logprobs, "finish_reason": finish}
