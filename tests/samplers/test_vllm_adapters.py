"""Adapters alone on servers that play vLLM: versions beside each other, nothing paused, nothing mixed."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_fleet import adapted, running
from fake_vllm import FakeVllm
from fleet_cases import checked, collect, until
from safetensors.numpy import load_file
from sampler_cases import MAX_LENGTH, Letters, Tiny

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.models import hf_weights
from jaxrl_llm.samplers.servers.answers import Refused, ServerFault
from jaxrl_llm.samplers.vllm import adapters as alone
from jaxrl_llm.samplers.vllm.adapters import AdapterPublisher
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

pytestmark = pytest.mark.usefixtures("quick_heart")


def test_requests_end_with_the_adapters_that_they_began_with_and_nothing_is_paused(tiny, tmp_path, prefixes):
    async def run() -> None:
        servers = [FakeVllm(adapters={}, step_s=0.01, dev=False) for _ in range(2)]
        async with running(tiny, tmp_path, servers) as client:
            await client.publish({}, 0)
            early = asyncio.create_task(collect(client, prefixes, 2, SamplingParams(max_tokens=20)))
            await until(lambda: all(server.active for server in servers))
            for version in (1, 2):
                await client.publish({}, version)
                assert set(checked(prefixes, await collect(client, prefixes[:3], 1, SamplingParams(max_tokens=2)))) == {
                    version
                }
            assert not early.done(), "nothing waits for what is in flight"
            await client._publication
            kept = {path.name for path in tmp_path.glob("v*")}
            assert kept == {"v00000000", "v00000002"}, "of what is neither the newest nor in flight nothing stays"
            assert set(checked(prefixes, await early)) == {0}
            await client.publish({}, 3)
            await client._publication
            found = client.metrics()
        for server in servers:
            assert [c for c in server.calls if c.startswith("load")] == [f"load {v}" for v in range(4)]
            assert set(server.calls) == {*(f"load {v}" for v in range(4)), *(f"unload {v}" for v in range(4))}
            assert list(server.adapters) == [] and not server.counts["/collective_rpc"]
        assert found["sampler/retries"] == found["sampler/set_aside"] == 0 and found["publish/paused_s"] == 0

    asyncio.run(run())


def test_a_server_that_was_started_anew_loads_the_newest_adapters_again(tiny, tmp_path, prefixes):
    async def run() -> None:
        servers = [FakeVllm(adapters={}, step_s=0.01) for _ in range(2)]
        async with running(tiny, tmp_path, servers) as client:
            for version in (0, 1):
                await client.publish({}, version)
                await collect(client, prefixes[:2], 1)
            servers[0].adapters.clear()  # as in one that was ended and started between two requests
            assert set(checked(prefixes, await collect(client, prefixes, 3))) == {1}
            await until(lambda: servers[0].adapters)
            assert list(servers[0].adapters.values()) == [1]
            assert client.metrics()["sampler/set_aside"] == 1
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: servers[1].active)
            await servers[1].kill()
            assert set(checked(prefixes, await asked)) == {1}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("server", "error", "message"),
    [
        (FakeVllm(), Refused, r"loads no adapters while it runs: start it with --enable-lora .* VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (FakeVllm(adapters={}, off=0.5), ServerFault, r"scores the canary apart from the learner under version 0"),
        (FakeVllm(adapters={}, status={"/v1/load_lora_adapter": 500}), ServerFault, r"/v1/load_lora_adapter with 500"),
    ],
    ids=["no route", "another base", "fails"],
)  # fmt: skip
def test_a_server_that_cannot_serve_them_is_told_of(tiny, tmp_path, prefixes, server, error, message):
    async def run() -> None:
        async with running(tiny, tmp_path, [server]) as client:
            with pytest.raises(error, match=message):
                await client.publish({}, 0)
                await collect(client, prefixes[:1], 1)
        assert not server.bodies, "no request was asked of adapters that failed"

    asyncio.run(run())


def test_a_version_that_the_canary_refuses_leaves_the_one_before_in_use(tiny, tmp_path, prefixes):
    async def run() -> None:
        good, bad = FakeVllm(adapters={}), FakeVllm(adapters={})
        async with running(tiny, tmp_path, [good, bad]) as client:
            await client.publish({}, 0)
            await collect(client, prefixes, 1)
            bad.holds, before = 0, len(bad.bodies)  # it goes on by version 0, whatever it loads
            await client.publish({}, 1)
            assert set(checked(prefixes, await collect(client, prefixes, 2))) == {1}
            assert len(bad.bodies) == before

    asyncio.run(run())


@pytest.mark.parametrize("fields", [{"transfer": "cuda_ipc"}, {"proxied": True}, {"publication": "gs://bucket/runs"}])
def test_what_does_not_go_with_adapters_alone_is_refused(fields):
    with pytest.raises(
        ValueError, match=r"VllmSampler.adapters needs transfer 'orbax', servers without a proxy of ours, and a folder"
    ):
        VllmSampler(spawn=False, urls=("http://a:1",), adapters=True, **fields)


def test_ranks_are_those_that_vllm_takes():
    ranks = [alone.arguments(rank)[2] for rank in (1, 8, 9, 16, 300, 512)]
    assert ranks == ["8", "8", "16", "16", "320", "512"]
    with pytest.raises(ValueError, match=r"lora.LoRA.rank must be 1..512 .*\(got 513\)"):
        alone.arguments(513)


def written(tiny: Tiny, folder: Path, base: Path | None, dtype: str) -> tuple[AdapterPublisher, Any, list[Path]]:
    """A publisher with versions 0 and 1 of adapters, and those of version 1."""
    policy = adapted(tiny)
    publisher = AdapterPublisher(
        policy=policy.plain,
        adapted=policy,
        folder=folder,
        dtype=dtype,
        keep=2,
        canary=np.arange(5, dtype=np.int32),
        base=base,
    )
    random = np.random.default_rng(3)
    paths = []
    for version in range(2):
        adapters = jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.3, x.shape), jnp.float32), policy.abstract())
        handed = jax.tree.map(jnp.copy, adapters)
        paths.append(publisher.start(policy.joined(handed, tiny.params), version)[0])
        jax.tree.map(lambda x: x.delete(), handed)  # as an update donates them, while the version is written
        asyncio.run(publisher.finish(version))
    return publisher, adapters, paths


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_is_a_folder_as_peft_has_it(tiny, tmp_path, dtype):
    (tmp_path / "out" / "v00000007").mkdir(parents=True)
    publisher, adapters, paths = written(tiny, tmp_path / "out", None, dtype)
    hf_weights.save_adapters(publisher.adapted, adapters, tmp_path / "peft", base_name=None, dtype=dtype)
    got, want = (load_file(folder / "adapter_model.safetensors") for folder in (paths[1], tmp_path / "peft"))
    assert got.keys() == want.keys() and all(
        (got[name] == x).all() and got[name].dtype == x.dtype for name, x in want.items()
    )
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (paths[1], tmp_path / "peft")]
    assert configs[0] == configs[1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["v00000000", "v00000001"], (
        "an earlier run's are gone"
    )
    first, second = (
        publisher.adapter(1),
        publisher.start(publisher.adapted.joined(adapters, tiny.params), 1) and publisher.adapter(1),
    )
    assert first != second and alone.version_named(first) == alone.version_named(second) == 1


def test_the_canary_is_scored_with_the_adapters_beside_their_base(tiny, tmp_path):
    publisher, adapters, _ = written(tiny, tmp_path, None, "float32")
    policy = publisher.adapted
    _, manifest = publisher.start(policy.joined(adapters, tiny.params), 2)
    logits = Tiny(policy=policy.plain, params=policy.merged(adapters, tiny.params)).logits([np.arange(5)])[0]
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert manifest.canary is not None
    np.testing.assert_allclose(manifest.canary.logprobs, [want[i, i + 1] for i in range(4)], atol=1e-4)


def test_the_base_is_written_once_before_the_first_version_and_goes_with_the_versions(tiny, tmp_path):
    base = tmp_path / "vllm" / "model"
    base.mkdir(parents=True)
    (base / "of_an_earlier_start").touch()
    publisher, _, _ = written(tiny, tmp_path / "out", base, "float32")
    assert not (base / "of_an_earlier_start").exists()
    again = hf_weights.load(publisher.policy, base)
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(tiny.params), strict=True))
    stamp = (base / "model.safetensors").stat().st_mtime_ns
    publisher.start(publisher.adapted.joined(publisher.adapted.init(jax.random.key(0)), tiny.params), 2)
    assert (base / "model.safetensors").stat().st_mtime_ns == stamp
    publisher.close(remove=True)
    assert not base.exists() and not (tmp_path / "out").exists()


def test_local_servers_hold_the_base_before_they_start(tiny, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.ERROR)
    sampler = VllmSampler(adapters=True, sequences=4)
    monkeypatch.setattr(type(sampler.local), "release", lambda self: (0, 32))
    (child,) = sampler._children(adapted(tiny), Letters(), MAX_LENGTH, tmp_path)
    command = child.command
    option = lambda name: command[len(command) - 1 - command[::-1].index(name) + 1]  # noqa: E731  (the last counts)
    assert option("--load-format") == "auto" and option("--max-lora-rank") == "8" and "--enable-lora" in command
    assert child.config.environment_of(0)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert option("--model") == str(tmp_path / "vllm" / "model") and not (tmp_path / "vllm" / "model").exists()
