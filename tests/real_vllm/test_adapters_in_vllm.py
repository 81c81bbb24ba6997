"""Adapters beside their base inside a real server: log-probs are those of the weights with the product added, of the version that is asked for."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import ON_TWO_CORES, TINY_ON_CPU, Server, serving
from tiny_qwen2 import TINY, VOCABULARY, weights, write_model

from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.lora import LoRA
from jaxrl_llm.samplers.servers.answers import Ask, Piece, Refused, ServerFault
from jaxrl_llm.samplers.vllm import adapters as alone
from jaxrl_llm.samplers.vllm.server_api import VllmHttp

TOLERANCE = 1e-4  # nats, float32
LOW = LoRA(rank=5, alpha=20.0)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, 200)]
LIKELY = [3] * (len(PROMPT) - 1)
SHORT, LONG = PROMPT[:16], 2000  # a prompt, and so many tokens that its request is in flight for about ten seconds
WINDOW = 2048


def adapters(version: int) -> dict[str, np.ndarray]:
    """Random lora_A [r, in] and lora_B [out, r] of every linear map of the layers."""
    random, found = np.random.default_rng(version), {}
    for name, matrix in weights(0).items():
        if name.removesuffix(".weight").rpartition(".")[2] in LOW.targets and name.endswith(".weight"):
            stem, (out, inner) = name.removesuffix(".weight"), matrix.shape
            found[f"{stem}.lora_A.weight"] = random.normal(0, 0.05, (LOW.rank, inner)).astype(np.float32)
            found[f"{stem}.lora_B.weight"] = random.normal(0, 0.05, (out, LOW.rank)).astype(np.float32)
    assert len(found) == 2 * 7 * TINY.layers
    return found


def summed(version: int) -> dict[str, np.ndarray]:
    """The base with the product of each adapter added."""
    low, found = adapters(version), dict(weights(0))
    for name in [name for name in low if "lora_A" in name]:
        stem = name.removesuffix(".lora_A.weight")
        product = low[f"{stem}.lora_B.weight"].astype(np.float64) @ low[name]
        found[f"{stem}.weight"] = (found[f"{stem}.weight"] + LOW.scale * product).astype(np.float32)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Versions 0 and 1 of adapters."""
    made = [tmp_path_factory.mktemp(f"v{version}") for version in range(2)]
    for version, folder in enumerate(made):
        hf_weights.write_peft(LOW, adapters(version), folder, None)
    return [str(folder) for folder in made]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that holds version 0 of the tiny model as the base."""
    sizes = TINY._replace(context=WINDOW)
    base: Path = write_model(tmp_path_factory.mktemp("base") / "model", tied=False, sizes=sizes)
    save_file(weights(0), base / "model.safetensors", metadata={"format": "pt"})
    log = tmp_path_factory.mktemp("server_of_adapters") / "log"
    options = (*TINY_ON_CPU, "--max-model-len", str(WINDOW), *alone.arguments(LOW.rank))
    with serving(base, log, *options, **{alone.RUNTIME: "True"}, **ON_TWO_CORES) as started:
        yield started


def carried_out(server: Server, steps: Any) -> None:
    async def run() -> None:
        http = VllmHttp(url=server.url, vocabulary=VOCABULARY, adapters=True)
        try:
            await http.open()
            assert http.lists, "our own route is there"
            await steps(http)
        finally:
            await http.close()

    asyncio.run(run())


async def drawn(http: VllmHttp, count: int) -> Piece:
    pieces = [Piece()]
    sampling = {"n": 1, "max_tokens": count, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    await http.generate(Ask(tokens=SHORT, sampling=sampling), pieces)
    return pieces[0]


def test_each_version_is_the_base_with_its_own_product(served, folders, references):
    from by_transformers import Reference

    want = [Reference(summed(version)).logprobs(PROMPT) for version in range(2)]

    async def steps(http: VllmHttp) -> None:
        names = [alone.named("ab", version, 1) for version in range(2)]
        for name, folder in zip(names, folders):
            await alone.load(http, name, folder)
            await alone.load(http, name, folder)  # once more does nothing
        for version in (0, 1, 0):
            text, _ = await http.score(PROMPT, LIKELY, 0, names[version])
            assert np.abs(text - want[version]).max() < TOLERANCE
        base, _ = await http.score(PROMPT, LIKELY, 0)
        assert np.abs(base - references(0).logprobs(PROMPT)).max() < TOLERANCE
        assert min(np.abs(want[0] - want[1]).max(), np.abs(base - want[0]).max()) > 0.1
        http.adapter = names[0]
        with pytest.raises(Refused, match="has to lie where both see it"):
            await alone.load(http, "ab-2-1", "/no/such/folder")

    carried_out(served, steps)


def test_a_request_ends_with_its_version_while_others_begin_with_the_next(served, folders):
    from by_transformers import Reference

    async def steps(http: VllmHttp) -> None:
        names = [alone.named("cd", version, 1) for version in range(2)]
        await alone.load(http, names[0], folders[0])
        http.version, http.adapter = 0, names[0]
        early = asyncio.create_task(drawn(http, LONG))
        await asyncio.sleep(0.2)
        await alone.load(http, names[1], folders[1])
        http.version, http.adapter = 1, names[1]
        await alone.unload_idle(http)
        late = await drawn(http, 8)
        assert not early.done()
        pieces = [await early, late]
        for version, piece in enumerate(pieces):
            assert set(piece.versions) == {version}
            found = Reference(summed(version)).logprobs([*SHORT, *piece.tokens])[len(SHORT) - 1 :]
            assert np.abs(found - piece.logprobs).max() < TOLERANCE
        await alone.unload_idle(http)
        http.adapter = names[0]
        with pytest.raises(ServerFault, match="no model 'cd-0-1' is served here"):
            await drawn(http, 1)

    carried_out(served, steps)


def test_the_newest_version_waits_for_none_of_those_in_flight(served, folders):
    async def steps(http: VllmHttp) -> None:
        names = [alone.named("ef", version, 1) for version in range(alone.VERSIONS)]
        early = []
        for version, name in enumerate(names[:-1]):
            await alone.load(http, name, folders[version % 2])
            http.version, http.adapter = version, name
            early.append(asyncio.create_task(drawn(http, LONG)))
            await asyncio.sleep(0.2)
        await alone.load(http, names[-1], folders[1])
        http.adapter = names[-1]
        await http.score(PROMPT, LIKELY, 0)
        assert not any(one.done() for one in early)
        assert [len(one.tokens) for one in await asyncio.gather(*early)] == [LONG] * len(early)

    carried_out(served, steps)


def test_a_run_unloads_what_a_former_run_of_its_tenant_left_when_nothing_asks_for_it(served, folders):
    async def steps(http: VllmHttp) -> None:
        old, new, other = "tenant~aa-0-1", "tenant~bb-0-1", "another~cc-0-1"
        for name in (old, new, other):
            await alone.load(http, name, folders[0])
        http.version, http.adapter = 0, old
        asking = [asyncio.create_task(drawn(http, LONG))]
        while old not in await alone._used(http):  # the server's metrics follow its steps
            asking.append(asyncio.create_task(drawn(http, LONG)))
            await asyncio.sleep(0.5)
        http.flying.clear()  # the new run does not know of the former one's requests
        http.adapter = new
        await alone.unload_idle(http)
        assert {old, new, other} <= await alone._held(http)
        assert {len(piece.tokens) for piece in await asyncio.gather(*asking)} == {LONG}
        http.flying.clear()
        for _ in range(20):
            await asyncio.sleep(0.5)
            await drawn(http, 1)
            await alone.unload_idle(http)
            if old not in await alone._held(http):
                break
        assert await alone._held(http) >= {new, other} and old not in await alone._held(http)

    carried_out(served, steps)
