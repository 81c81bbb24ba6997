"""The client against servers that play SGLang: every token of its version, settings in SGLang's words, faults, restarts."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sglang import FakeSglang
from fleet_cases import checked, collect, running, until
from sampler_cases import MAX_LENGTH, Tiny

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.servers.answers import Refused, ServerFault
from jaxrl_llm.samplers.servers.server_http import many_files
from jaxrl_llm.samplers.sglang import LocalServers, SglangSampler

pytestmark = pytest.mark.usefixtures("quick_heart")


@pytest.fixture
def begin(tiny: Tiny, tmp_path: Path) -> Callable[..., Any]:
    """Starts fake servers and a client of them."""
    return partial(running, tiny, tmp_path, kind=SglangSampler)


@pytest.mark.parametrize("inflight", ["wait", "abort_resume"])
def test_every_token_has_the_version_that_drew_it(begin, prefixes, inflight):
    """Weights change three times under requests in flight; a log-prob of another version's table would differ."""

    async def run() -> None:
        servers = [FakeSglang(step_s=0.01, room=9) for _ in range(2)]
        async with begin(servers, inflight=inflight, sequences=12) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: servers[0].drawn > 3)
            for version in (1, 2, 3):
                await asyncio.sleep(0.04)
                await client.publish({}, version)
            versions = checked(prefixes, await asked)
            groups = await collect(client, prefixes, 2)
            assert set(checked(prefixes, groups)) == {3}, "requests after a publication are its version's"
        assert len(versions) == sum(min(12, MAX_LENGTH - len(p)) * 3 for p in prefixes)
        assert len(set(versions)) > 1
        abort = ["abort"] if inflight == "abort_resume" else []
        assert servers[0].calls[-len(abort) - 4 :] == [*abort, "pause", "flush", "update 3", "continue"]

    asyncio.run(run())


def test_settings_arrive_in_the_words_of_sglang(begin, prefixes):
    async def run() -> None:
        server = FakeSglang()
        cut = SamplingParams(max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop_token_ids=(4, 7))
        async with begin([server]) as client:
            await client.publish({}, 0)
            groups = await collect(client, prefixes[:2], 2, cut)
            await collect(client, prefixes[:1], 1, SamplingParams(max_tokens=3, temperature=0.0))
        assert len(server.bodies) == 5, "each sample is a request of its own"
        sent = server.bodies[0]["sampling_params"]
        want = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.0}
        assert want.items() <= sent.items() and sent["max_new_tokens"] == 9 and sent["stop_token_ids"] == [4, 7]
        assert not sent["ignore_eos"] and server.bodies[-1]["sampling_params"]["ignore_eos"], "it ignores stop ids too"
        assert sent["no_stop_trim"] and not sent["skip_special_tokens"] and "n" not in sent
        assert server.bodies[0]["return_sampling_mask"] and not server.bodies[-1]["return_sampling_mask"]
        assert server.bodies[-1]["sampling_params"]["top_k"] == -1
        for one in (one for group in groups.values() for one in group):
            ended = one.tokens[-1] in (4, 7)
            assert one.finish == ("stop" if ended else "length") and (ended or len(one.tokens) == 9)

    asyncio.run(run())


def test_a_text_goes_on_past_an_end_of_the_model_that_is_none_of_the_runs(begin, prefixes):
    """SGLang stops at the ids of the model's generation_config.json, too, wherever it stops at those of a request."""

    async def run() -> None:
        server = FakeSglang(ends=(3, 5, 8))
        async with begin([server]) as client:
            await client.publish({}, 0)
            groups = await collect(client, prefixes, 4, SamplingParams(max_tokens=12, stop_token_ids=(4,)))
        checked(prefixes, groups)
        passed = 0
        for one in (one for group in groups.values() for one in group):
            passed += bool(set(one.tokens[:-1].tolist()) & {3, 5, 8})
            assert 4 not in one.tokens[:-1] and (one.finish == "stop") == (one.tokens[-1] == 4)
        assert passed > 10 and len(server.bodies) > 40

    asyncio.run(run())


def test_a_stop_drawn_in_the_step_that_cuts_a_text_ends_it(begin, prefixes):
    """SGLang's aborted requests have the token of the step in which they end, and say "abort" even where it is a stop."""

    async def run() -> None:
        server = FakeSglang(step_s=0.005)
        async with begin([server]) as client:
            await client.publish({}, 0)
            stops = SamplingParams(max_tokens=30, stop_token_ids=(0, 3, 5, 8, 11, 14))
            asked = asyncio.create_task(collect(client, prefixes, 8, stops))
            for version in range(1, 9):
                await asyncio.sleep(0.02)
                await client.publish({}, version)
            groups = await asked
        checked(prefixes, groups)
        for one in (one for group in groups.values() for one in group):
            assert not set(one.tokens[:-1].tolist()) & {0, 3, 5, 8, 11, 14}

    asyncio.run(run())


def test_samples_of_a_part_of_the_distribution_that_were_cut_while_they_waited_are_drawn_again(begin, prefixes):
    """Of those SGLang gives log-probs of the whole distribution alone: their tokens do not count."""

    async def run() -> None:
        server = FakeSglang(step_s=0.01, retracted=True)
        async with begin([server]) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes[:4], 2, SamplingParams(max_tokens=9, top_p=0.8)))
            await until(lambda: server.drawn > 8)
            await client.publish({}, 1)
            groups = await asked
        for one in (one for group in groups.values() for one in group):
            object.__setattr__(one, "logprobs", one.logprobs * 2)
        assert set(checked(prefixes, groups)) == {1}

    asyncio.run(run())


def test_an_update_waits_for_requests_that_the_server_still_read_at_the_abort(begin, prefixes):
    async def run() -> None:
        server = FakeSglang(step_s=0.05, late=5)
        async with begin([server]) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 2, SamplingParams(max_tokens=20)))
            await until(lambda: server.drawn > 8)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await client.publish({}, 1)
            await client.publish({}, 2)  # returns once version 1 is served
            assert loop.time() - began < 4.0, "the abort is said again"
            checked(prefixes, await asked)

    asyncio.run(run())


def test_a_server_with_requests_of_nobody_is_not_updated_in_their_midst(begin, prefixes):
    async def run() -> None:
        servers = [FakeSglang(), FakeSglang()]
        async with begin(servers) as client:
            await client.publish({}, 0)
            await collect(client, prefixes[:1], 1)
            servers[0].orphans = True
            await client.publish({}, 1)
            assert set(checked(prefixes, await collect(client, prefixes, 2))) == {1}
            assert servers[0].version == 0 and "update 1" not in servers[0].calls
            servers[0].orphans = False
            await until(lambda: servers[0].version == 1)

    asyncio.run(run())


def test_a_server_with_too_short_a_context_is_refused_with_the_one_that_it_needs(begin, prefixes):
    async def run(context: int) -> None:
        async with begin([FakeSglang(context=context)]) as client:
            await client.publish({}, 0)
            groups = await collect(client, prefixes, 1, SamplingParams(max_tokens=MAX_LENGTH))
            assert all(len(p) + len(groups[i][0].tokens) == MAX_LENGTH for i, p in enumerate(prefixes))

    with pytest.raises(Refused, match=rf"--context-length {MAX_LENGTH + 8}"):
        asyncio.run(run(MAX_LENGTH))
    asyncio.run(run(MAX_LENGTH + 8))


def test_a_penalty_of_repetitions_that_sglang_counts_otherwise_is_refused(begin, prefixes):
    async def run() -> None:
        async with begin([FakeSglang()]) as client:
            await client.publish({}, 0)
            with pytest.raises(Refused, match=r"set SamplingParams.repetition_penalty = 1 \(got 1.3\)"):
                await collect(client, prefixes[:1], 1, SamplingParams(max_tokens=3, repetition_penalty=1.3))

    asyncio.run(run())


def test_log_probs_are_those_of_the_distribution_that_was_cut_off(begin, prefixes):
    """SGLang gives two: of all tokens, and renormalized over those that could be drawn, which the test's server halves."""

    async def run() -> None:
        async with begin([FakeSglang()]) as client:
            await client.publish({}, 0)
            groups = await collect(client, prefixes[:3], 2, SamplingParams(max_tokens=5, top_p=0.9))
        for group in groups.values():
            for one in group:
                object.__setattr__(one, "logprobs", one.logprobs * 2)
        checked(prefixes, groups)

    asyncio.run(run())


def test_a_killed_server_loses_no_sample_and_rejoins_with_the_present_weights(begin, prefixes):
    async def run() -> None:
        servers = [FakeSglang(step_s=0.01) for _ in range(2)]
        async with begin(servers) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: servers[0].active)
            await servers[0].kill()
            checked(prefixes, await asked)
            await client.publish({}, 1)
            assert set(checked(prefixes, await collect(client, prefixes, 1))) == {1}
            await servers[0].start()
            await until(lambda: servers[0].version == 1 and servers[0].going.is_set())
            found = client.metrics()
            assert found["sampler/retries"] >= 1 and found["sampler/set_aside"] == 1

    asyncio.run(run())


def test_a_restarted_server_is_found_by_its_mark_and_its_tokens_are_drawn_again(begin, prefixes):
    async def run() -> None:
        servers = [FakeSglang(step_s=0.01) for _ in range(2)]
        async with begin(servers) as client:
            await client.publish({}, 0)
            asked = asyncio.create_task(collect(client, prefixes, 3))
            await until(lambda: servers[0].active)
            servers[0].mark, servers[0].version = "default", 9  # other weights, without a broken connection
            assert set(checked(prefixes, await asked)) == {0}
            assert client.metrics()["sampler/set_aside"] == 1

    asyncio.run(run())


def test_an_update_that_fails_is_made_again(begin, prefixes):
    async def run() -> None:
        servers = [FakeSglang(), FakeSglang()]
        async with begin(servers) as client:
            await client.publish({}, 0)
            servers[0].refuses = True
            await client.publish({}, 1)
            assert set(checked(prefixes, await collect(client, prefixes, 2))) == {1}
            await until(lambda: servers[0].version == 1 and servers[0].going.is_set())

    asyncio.run(run())


def test_other_weights_than_the_learners_are_found_by_the_canary(begin, prefixes):
    async def run() -> None:
        server = FakeSglang(off=0.5)
        async with begin([server]) as client:
            await client.publish({}, 0)
            with pytest.raises(ServerFault, match="scores the canary apart from the learner"):
                await collect(client, prefixes[:1], 1)
        assert server.calls[-2:] == ["pause", "flush"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "garbage", [{}, [], {"output_ids": [3], "meta_info": {"finish_reason": {"type": "length"}}}, "text", None]
)
def test_what_is_no_sample_is_a_fault_of_the_server(begin, prefixes, garbage):
    async def run() -> None:
        servers = [FakeSglang(), FakeSglang()]
        async with begin(servers) as client:
            await client.publish({}, 0)
            await collect(client, prefixes[:1], 1)
            servers[0].garbage = garbage
            checked(prefixes, await collect(client, prefixes, 2))
            assert client.metrics()["sampler/set_aside"] == (garbage is not None)

    asyncio.run(run())


def test_a_key_is_sent_and_its_absence_is_refused_by_name(begin, prefixes, monkeypatch):
    async def run() -> None:
        monkeypatch.setenv("THE_KEY", "k" * 32)
        async with begin([FakeSglang(key="k" * 32)], api_key_variable="THE_KEY") as client:
            await client.publish({}, 0)
            checked(prefixes, await collect(client, prefixes, 1))
        async with begin([FakeSglang(key="k" * 32)]) as client:
            await client.publish({}, 0)
            with pytest.raises(Refused, match=r"answered GET /server_info with 401"):
                await collect(client, prefixes[:1], 1)

    asyncio.run(run())


def test_a_server_that_draws_nothing_is_seen_by_its_count_of_tokens(begin, prefixes):
    async def run() -> None:
        server = FakeSglang()
        async with begin([server]) as client:
            await client.publish({}, 0)
            await collect(client, prefixes[:1], 1)
            assert client._fleet is not None
            http = client._fleet.servers[0].http
            assert await http.progress() == server.drawn > 0
            server.metrics = False
            assert await http.progress() is None

    asyncio.run(run())


def test_a_published_folder_is_the_policy_in_the_names_of_hugging_face(tiny: Tiny, tmp_path: Path):
    """The folder of a version, beside the folder that `save` writes of the same parameters; of three versions two are kept."""
    from safetensors.numpy import load_file

    from jaxrl_llm.models import hf_weights
    from jaxrl_llm.samplers.sglang.publisher import FolderPublisher

    hf_weights.save(tiny.policy, tiny.params, tmp_path / "saved", dtype="bfloat16")
    publisher = FolderPublisher(
        policy=tiny.policy, folder=tmp_path / "published", dtype="bfloat16", keep=2, canary=np.arange(5)
    )

    async def run() -> None:
        for version in range(3):
            path, manifest = publisher.start(tiny.params, version)
            await publisher.finish(version)
            await publisher.prune()
        assert sorted(x.name for x in (tmp_path / "published").iterdir()) == ["v00000001", "v00000002"]
        want, got = load_file(tmp_path / "saved/model.safetensors"), load_file(path / "model.safetensors")
        assert want.keys() == got.keys() == manifest.tensors.keys()
        for name, x in want.items():
            np.testing.assert_array_equal(x.view(np.uint16), got[name].view(np.uint16))

    asyncio.run(run())
    publisher.close(remove=True)
    assert not (tmp_path / "published").exists()


def test_settings_that_cannot_be_are_refused_with_the_way_out(tmp_path: Path):
    with pytest.raises(ValueError, match=r"either spawn=True or urls"):
        SglangSampler(spawn=False)
    with pytest.raises(ValueError, match=r"SGLang reads no object storage"):
        SglangSampler(publication="s3://bucket/place")
    with pytest.raises(
        ValueError, match=r"must leave out --api-key and --config and --host and --port, .*SGLANG_SPAWN = False"
    ):
        LocalServers(arguments=("--config", "mine.yaml"))
    with pytest.raises(FileNotFoundError, match=r"has no SGLang .*sglang.LocalServers.python or python_path"):
        LocalServers().release()


def test_the_key_of_a_local_server_is_in_a_file_of_its_user_alone(tmp_path: Path):
    from jaxrl_llm.samplers.servers.local_server import LocalServer

    config = LocalServers(memory_share=0.5, arguments=("--attention-backend", "fa3"), environment={"A": 1})
    server = LocalServer(
        config=config, number=3, model=tmp_path, log=tmp_path / "s" / "server3.log", arguments=("--dtype", "bfloat16")
    )
    command = server.command
    file = Path(command[command.index("--config") + 1])
    assert file.read_text() == f"api-key: '{server.key}'\n" and file.stat().st_mode & 0o777 == 0o600
    assert server.key not in " ".join(command) and config.environment_of(3, server.key)["A"] == "1"
    assert server.key not in config.environment_of(3, server.key).values()
    assert command[-4:] == ["--dtype", "bfloat16", "--attention-backend", "fa3"]
    assert (
        command[command.index("--random-seed") + 1] == "3"
        and command[command.index("--mem-fraction-static") + 1] == "0.5"
    )


def test_there_is_room_for_a_connection_to_each_sample(tmp_path: Path):
    """In a process of its own, since a lowered hard limit stays."""
    import resource
    import subprocess
    import sys

    program = (
        "import resource as r; from jaxrl_llm.samplers.servers.server_http import many_files\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 2048)); many_files(); print(r.getrlimit(r.RLIMIT_NOFILE))\n"
        "many_files(); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["(2048, 2048)"] * 2
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    many_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) >= before
