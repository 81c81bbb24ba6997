"""Records of experts from servers that play vLLM 0.21, 0.22 and 0.33: decoded alike, and believed only where they fit."""

import asyncio
import base64
import io
import json
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from fake_vllm import FakeVllm, answer

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.requests import Draft, Request
from jaxrl_llm.samplers.routes import Recording
from jaxrl_llm.samplers.servers.answers import Ask, Piece, Refused
from jaxrl_llm.samplers.vllm.server_api import VllmHttp

EXPERTS, CHOSEN, SPARSE = 40, 3, (False, True, True, False)
RECORDING = Recording(experts=EXPERTS, chosen=CHOSEN, sparse=SPARSE, dtype="uint8")


def experts_of(tokens):
    """[T, all layers, k]: a layer without experts has zeros."""
    rows = np.zeros((len(tokens), len(SPARSE), CHOSEN), np.int64)
    for place, token in enumerate(tokens):
        for layer in np.flatnonzero(SPARSE):
            rows[place, layer] = np.random.default_rng([place, int(token), int(layer)]).permutation(EXPERTS)[:CHOSEN]
    return rows


def written(rows):
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


@dataclass(eq=False, kw_only=True)
class Recorder(FakeVllm):
    """A server that tells of experts: `form` is "lists", or the dtype of its arrays; `spoil` changes what it says."""

    form: str = "uint8"
    spoil: Any = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        found = await super()._generate(request)
        if not body or self.form == "none":
            return found
        said = json.loads(found.text)
        for choice in said["choices"]:
            prompt, sampled = body["prompt"], choice["token_ids"]
            rows = experts_of([*prompt, *sampled[:-1]])
            rows = rows if self.spoil is None else self.spoil(rows)
            if self.form == "lists":
                choice["prompt_routed_experts"] = rows[: len(prompt)].tolist()
                choice["routed_experts"] = rows[len(prompt) :].tolist()
            else:
                choice["routed_experts"] = written(rows[body.get("routed_experts_prompt_start", 0) :].astype(self.form))
        return await answer(said)


def asked(server, asks, recording=RECORDING):
    """The pieces of each ask, in turn, and the connection."""

    async def run():
        await server.start()
        http = VllmHttp(url=server.url, recording=recording)
        try:
            await http.open()
            server.version, server.label, found = 0, "0", []
            for ask in asks:
                pieces = [Piece() for _ in range(ask.n)]
                await http.generate(ask, pieces)
                found.append(pieces)
            return found, http
        finally:
            await http.close()
            await server.kill()

    return asyncio.run(run())


def ask(tokens, n=2, routed=0):
    sampling = {
        "n": n,
        "max_tokens": 5,
        "temperature": 1.0,
        "logprobs": 0,
        "stop_token_ids": [],
        "seed": 1,
        "ignore_eos": True,
    }
    return Ask(tokens=tokens, sampling=sampling, routed=routed)


FORMS = [("0.21.0", "lists"), ("0.22.0", "int32"), ("0.32.0", "uint16"), ("0.33.0", "uint8")]


@pytest.mark.parametrize(("release", "form"), FORMS)
def test_every_form_gives_the_experts_of_the_layers_that_have_them(release, form):
    prefix = [3, 1, 4, 1]
    (first, rest), _ = asked(Recorder(release=release, form=form), [ask(prefix), ask([*prefix, 5, 9], n=1, routed=5)])
    for piece in first:
        want = experts_of([*prefix, *piece.tokens[:-1]])[:, [1, 2]]
        assert piece.routes.dtype == np.uint8 and np.array_equal(piece.routes, want)
    # A request that goes on with a sample asks for what is not known yet.
    assert np.array_equal(rest[0].routes, experts_of([*prefix, 5, 9, *rest[0].tokens[:-1]])[5:, [1, 2]])


def test_pieces_of_a_sample_are_joined_by_the_place_of_their_tokens():
    request = Request(
        prefixes=[np.array([3, 1, 4])], n=1, settings=SamplingParams(max_tokens=17), seeds=[0], max_length=20
    )
    draft = Draft(request=request, index=0, sample=0)
    tokens = [3, 1, 4, 7, 8, 9, 2]
    draft.record(experts_of(tokens[:4])[:, [1, 2]].astype(np.uint8))
    assert draft.routed == 4
    draft.record(experts_of(tokens[:6])[4:, [1, 2]].astype(np.uint8))
    draft.count = 4
    assert np.array_equal(draft.routes(), experts_of(tokens[:6])[:, [1, 2]])
    draft.count = 2  # a stop string dropped the rest
    assert np.array_equal(draft.routes(), experts_of(tokens[:4])[:, [1, 2]])


def twice(rows):
    rows = rows.copy()
    rows[0, 1, 0] = rows[0, 1, 1]
    return rows


SPOILT = {
    "a token short": (lambda rows: rows[1:], "tokens, not of the"),
    "too large": (lambda rows: rows + EXPERTS, "outside 0..39"),
    "twice": (twice, "twice for one token"),
    "other layers": (lambda rows: rows[:, :2], "of shape"),
}


@pytest.mark.parametrize("kind", list(SPOILT))
def test_a_record_that_does_not_fit_is_left_out_counted_and_told_once(kind, caplog):
    spoil, message = SPOILT[kind]

    class Late(Recorder):
        async def _generate(self, request):
            self.spoil = spoil if self.counts["/v1/completions"] > 1 else None  # once it has shown that it records
            return await super()._generate(request)

    with caplog.at_level(logging.WARNING):
        (pieces, again), http = asked(Late(form="int32"), [ask([3, 1, 4]), ask([3, 1, 4])])
    assert all(piece.routes is None and len(piece.tokens) == 5 for piece in (*pieces, *again))
    assert http.take_unrecorded() == 4 and http.take_unrecorded() == 0
    assert [message in record.message for record in caplog.records if "without a record" in record.message] == [True]


def test_a_server_that_does_not_record_is_refused_at_start():
    with pytest.raises(Refused, match="--enable-return-routed-experts"):
        asked(Recorder(form="none"), [])


def test_a_server_is_asked_for_no_record_where_none_is_wanted():
    (pieces,), http = asked(Recorder(form="none"), [ask([3, 1, 4])], recording=None)
    assert all(piece.routes is None for piece in pieces) and http.unrecorded == 0
