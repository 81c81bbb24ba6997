"""Local servers as child processes: a program that plays vLLM is started, waited for and stopped."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from sampler_cases import MAX_LENGTH, Letters, Tiny

from jaxrl_llm.samplers.servers.answers import ServerFault
from jaxrl_llm.samplers.servers.local_server import LocalServer, all_ready, free_port
from jaxrl_llm.samplers.vllm.local_server import LocalServers
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

# What is run in place of Python with vLLM: it answers every GET and says how it was started.
PROGRAM = """#!{python}
import http.server, json, os, signal, subprocess, sys, time
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "-c":
    print("{release}"); sys.exit()
print("loading the model", flush=True)
if "--leaves" in sys.argv:
    file = sys.argv[sys.argv.index("--leaves") + 1]
    if not os.path.exists(file):
        left = subprocess.Popen(["sleep", "600"])
        with open(file, "w") as out:
            out.write(str(left.pid))
        print("OSError: [Errno 98] Address already in use", flush=True); os._exit(1)
if "--taken" in sys.argv:
    tries = sys.argv[sys.argv.index("--taken") + 1]
    with open(tries, "a") as file:
        file.write("x")
    if os.path.getsize(tries) < int(sys.argv[sys.argv.index("--taken") + 2]):
        print("OSError: [Errno 98] Address already in use", flush=True); sys.exit(1)
if "--fail" in sys.argv:
    print("ValueError: no such architecture", flush=True); sys.exit(1)
if "--hang" in sys.argv:
    time.sleep(60)
if "--engine" in sys.argv:
    engine = subprocess.Popen(["sleep", "600"])
    def ended(number, frame):
        time.sleep(0.2)
        with open(sys.argv[sys.argv.index("--engine") + 1], "w") as out:
            out.write("gone" if engine.poll() is not None else "runs")
        os._exit(0)
    signal.signal(signal.SIGTERM, ended)
if "--late" in sys.argv:  # vLLM binds its port after seconds of imports
    time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}}
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(said).encode())
    def log_message(self, *_): pass
at = sys.argv.index("--port")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[at + 1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "python_with_vllm"
    file.write_text(PROGRAM.format(python=sys.executable, release="0.32.0+cpu"))
    file.chmod(0o755)
    return str(file)


def server(program: str, folder: Path, **fields: Any) -> LocalServer:
    config = LocalServers(python=program, **fields)
    return LocalServer(
        config=config, number=0, model=folder, log=folder / "logs" / "server0.log", arguments=("--dtype", "float32")
    )


async def asked(one: LocalServer) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{one.url}/health") as answer:
        return json.loads(await answer.text())


def alive(pid: int) -> bool:
    file = Path(f"/proc/{pid}/stat")
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_listens_on_loopback_with_a_key_that_its_command_line_does_not_show(program, tmp_path):
    async def run() -> None:
        one = server(
            program,
            tmp_path,
            devices=("3",),
            memory_share=0.4,
            environment={"EXTRA": "1"},
            arguments=("--enforce-eager",),
        )
        one.start()
        await one.ready()
        said = await asked(one)
        given, environment = said["arguments"], said["environment"]
        text = " ".join(given)
        assert (
            "--host 127.0.0.1" in text
            and "--logprobs-mode processed_logprobs" in text
            and text.endswith("--enforce-eager")
        )
        assert (
            "--generation-config vllm" in text and "--gpu-memory-utilization 0.4" in text and "--dtype float32" in text
        )
        assert environment["VLLM_API_KEY"] == one.key and one.key not in text
        assert (
            environment["CUDA_VISIBLE_DEVICES"] == "3"
            and environment["EXTRA"] == "1"
            and environment["VLLM_SERVER_DEV_MODE"] == "1"
        )
        await one.stop()
        assert not alive(said["pid"])
        assert "loading the model" in one.log.read_text()

    asyncio.run(run())


def test_a_server_that_ends_before_it_is_ready_says_why(program, tmp_path):
    async def run() -> None:
        one = server(program, tmp_path, arguments=("--fail",))
        one.start()
        with pytest.raises(
            ServerFault,
            match=r"ended before it was ready.*server0.log ends with:\n.*\nValueError: no such architecture",
        ):
            await one.ready()
        await one.stop()

    asyncio.run(run())


def test_a_server_that_met_a_port_in_use_is_started_anew(program, tmp_path, caplog):
    async def run() -> None:
        one = server(program, tmp_path, arguments=("--taken", str(tmp_path / "tries"), "3"))
        other = server(program, tmp_path)
        for each in (one, other):
            each.start()
        await all_ready([one, other])
        assert (await asked(one))["pid"] != (await asked(other))["pid"]
        await one.stop()
        await other.stop()

    asyncio.run(run())
    assert (tmp_path / "tries").read_text() == "xxx"
    assert [record.message[-6:] for record in caplog.records] == ["2 of 3", "3 of 3"]


def test_no_two_servers_are_given_one_port():
    assert len({free_port() for _ in range(1000)}) == 1000


def test_a_server_is_asked_to_end_before_its_parts_are(program, tmp_path):
    """vLLM tells its engines to end, and waits for what they answer."""

    async def run() -> None:
        one = server(program, tmp_path, arguments=("--engine", str(tmp_path / "engine")))
        one.start()
        await one.ready()
        await one.stop()

    asyncio.run(run())
    assert (tmp_path / "engine").read_text() == "runs"


def test_another_process_on_the_port_is_not_taken_for_the_server(program, tmp_path, caplog):
    """One that is healthy, and refuses a key that it does not know."""

    async def healthy(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.path == "/health" else 401)

    async def run() -> None:
        one = server(program, tmp_path, arguments=("--late",))
        foreign = web.AppRunner(other := web.Application())
        other.router.add_get("/{any:.*}", healthy)
        await foreign.setup()
        await web.TCPSite(foreign, "127.0.0.1", one.port).start()
        taken = one.port
        one.start()
        await one.ready()
        assert one.port != taken and (await asked(one))["environment"]["VLLM_API_KEY"] == one.key
        chosen = one.port
        await one.stop()
        await one.revive()
        assert one.port == chosen, "whoever knows the server asks it there"
        await one.stop()
        await foreign.cleanup()

    asyncio.run(run())
    assert [record.message[-6:] for record in caplog.records] == ["2 of 3"]


def test_what_a_start_left_behind_ends_before_the_next_one(program, tmp_path):
    async def run() -> None:
        one = server(program, tmp_path, arguments=("--leaves", str(tmp_path / "left")))
        one.start()
        await one.ready()
        assert not alive(int((tmp_path / "left").read_text()))
        await one.stop()

    asyncio.run(run())


def test_a_server_that_meets_ports_in_use_again_and_again_is_given_up(program, tmp_path):
    async def run() -> None:
        one = server(program, tmp_path, arguments=("--taken", str(tmp_path / "tries"), "9"))
        one.start()
        with pytest.raises(ServerFault, match=r"(?s)ended before it was ready.*Address already in use"):
            await all_ready([one])
        await one.stop()

    asyncio.run(run())
    assert (tmp_path / "tries").read_text() == "xxx"


def test_a_server_that_is_never_ready_ends_the_wait_at_its_limit(program, tmp_path):
    async def run() -> None:
        one = server(program, tmp_path, arguments=("--hang",), ready_s=0.5)
        one.start()
        begin = time.monotonic()
        with pytest.raises(ServerFault, match=r"not ready within 0.5 s: raise vllm.LocalServers.ready_s"):
            await one.ready()
        assert time.monotonic() - begin < 3
        await one.stop()

    asyncio.run(run())


def test_a_killed_server_is_started_anew_on_its_port(program, tmp_path):
    async def run() -> None:
        one = server(program, tmp_path)
        one.start()
        await one.ready()
        pid, port = (await asked(one))["pid"], one.port
        os.kill(pid, signal.SIGKILL)
        while not one.ended:
            await asyncio.sleep(0.01)
        await one.revive()
        assert (await asked(one))["pid"] != pid and one.port == port
        await one.stop()

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="a signal at the parent's end is Linux's")
@pytest.mark.parametrize("arguments", [(), ("--deaf",)])
def test_a_server_ends_with_the_process_that_started_it(program, tmp_path, arguments):
    """By force where it does not hear the request to end, or its own shutdown hangs."""
    code = f"""
import time
from pathlib import Path
from jaxrl_llm.samplers.servers import local_server
from jaxrl_llm.samplers.servers.local_server import LocalServer, all_ready
from jaxrl_llm.samplers.vllm.local_server import LocalServers
local_server._BOUND = local_server._BOUND.replace("15.0", "0.5")
one = LocalServer(config=LocalServers(python={program!r}), number=0, model=Path({str(tmp_path)!r}), log=Path({str(tmp_path)!r}) / "log", arguments={arguments!r})
one.start(); print(one.url, flush=True); time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert parent.stdout is not None
    port = int(parent.stdout.readline().rpartition(":")[2])

    async def run() -> int:
        one = LocalServer(
            config=LocalServers(), number=0, model=tmp_path, log=tmp_path / "log", arguments=(), port=port
        )
        for _ in range(200):
            try:
                return int((await asked(one))["pid"])
            except OSError:
                await asyncio.sleep(0.05)
        raise AssertionError("it never answered")

    pid = asyncio.run(run())
    parent.kill()
    parent.wait()
    limit = time.monotonic() + 5
    while alive(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not alive(pid)


def test_the_sampler_writes_a_model_folder_without_weights(program, tiny: Tiny, tmp_path):
    class Saving(Letters):
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.json").write_text("{}")

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            raise ValueError("no such letter")

    async def run() -> None:
        sampler = VllmSampler(local=LocalServers(python=program), dtype="float32", sequences=16)
        client = sampler.start(tiny.policy, Saving(), max_length=MAX_LENGTH, run_dir=tmp_path)
        fleet_of = client.connect
        with pytest.raises(ValueError, match="is no vLLM server"):
            await fleet_of()
        await client.close()
        config = json.loads((tmp_path / "vllm" / "model" / "config.json").read_text())
        assert config["model_type"] == "qwen3" and config["torch_dtype"] == "float32"
        assert sorted(p.name for p in (tmp_path / "vllm" / "model").iterdir()) == [
            "config.json", "generation_config.json", "tokenizer.json",
        ]  # fmt: skip

    asyncio.run(run())


def test_where_there_is_no_vllm_the_error_says_what_to_set(tiny: Tiny, tmp_path):
    empty = tmp_path / "python_without_vllm"
    empty.write_text("#!/bin/sh\n")
    empty.chmod(0o755)
    for python in (str(empty), str(tmp_path / "absent")):
        with pytest.raises(FileNotFoundError, match=r"LocalServers\.python"):
            LocalServers(python=python).release()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="either spawn=True or urls"):
        VllmSampler(spawn=True, urls=["http://a:1"])
    with pytest.raises(ValueError, match="devices must name"):
        LocalServers(count=2, devices=("0",))
    with pytest.raises(ValueError, match=r"must name 2 GPUs for each server.*got \['0'\]"):
        LocalServers(tensor_parallel=2, devices=("0",))
    assert LocalServers(tensor_parallel=2, devices=("2,3",)).environment_of(0)["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(ValueError, match="must leave out --host and --port"):
        LocalServers(arguments=("--port=8000",))
    with pytest.raises(ValueError, match=r"spawn=False, 0 urls .*name servers by VLLM_URLS"):
        VllmSampler(spawn=False)
    with pytest.raises(ValueError, match=r"VllmSampler.urls must be a list .*got 'http://a:1'"):
        VllmSampler(spawn=False, urls="http://a:1")
    with pytest.raises(ValueError, match=r"VllmSampler.urls must be addresses like http://HOST:PORT .*a:1"):
        VllmSampler(spawn=False, urls=["a:1"])
    with pytest.raises(ValueError, match=r"VllmSampler.publication must be a folder, or gs://BUCKET/PATH"):
        VllmSampler(publication="s3://")


def test_a_text_in_place_of_a_list_is_refused_and_numbers_are_taken_as_text(tmp_path):
    for name in ("devices", "python_path", "arguments"):
        with pytest.raises(ValueError, match=rf"vllm.LocalServers.{name} must be a list .*comma.*got '12'"):
            LocalServers(**{name: "12"})
    config = LocalServers(devices=(3,), arguments=("--seed", 1), environment={"VLLM_CPU_KVCACHE_SPACE": 1})
    given = config.environment_of(0)
    assert (given["CUDA_VISIBLE_DEVICES"], given["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "1")
    server = LocalServer(config=config, number=0, model=tmp_path, log=tmp_path / "log", arguments=())
    assert server.command[-2:] == ["--seed", "1"]


def test_servers_on_gpus_have_one_thread_of_pytorch_unless_it_is_said_otherwise(monkeypatch):
    name = "OMP_NUM_THREADS"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("jaxrl_llm.distributed.xla_flags.gpus", lambda: 0)
    assert name not in LocalServers().environment_of(0)  # on a CPU they compute with all cores
    assert LocalServers(devices=(0,)).environment_of(0)[name] == "1"
    monkeypatch.setattr("jaxrl_llm.distributed.xla_flags.gpus", lambda: 1)
    assert LocalServers().environment_of(0)[name] == "1"
    assert LocalServers(environment={name: 4}).environment_of(0)[name] == "4"
    monkeypatch.setenv(name, "2")
    assert LocalServers().environment_of(0)[name] == "2"
