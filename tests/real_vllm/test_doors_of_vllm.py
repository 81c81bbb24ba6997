"""Who reaches what of a real server: through the proxy from another host, and without development endpoints."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from serving import (
    ON_TWO_CORES,
    TINY_ON_CPU,
    Refusal,
    Server,
    environment,
    free_port,
    names_versions,
    running,
    serving,
    wait_until_ready,
)

from jaxrl_llm.publication.vllm_route import ROUTE

TOKEN = "sixteen letters and more"
HERE, THERE = "10.213.7.1", "10.213.7.2"  # a network of the two ends of one virtual cable


@contextmanager
def proxy_before(server: Server, log, host: str = "127.0.0.1"):
    port = free_port()
    command = [sys.executable, "-m", "jaxrl_llm.samplers.vllm_proxy", "--server", server.url]
    command += ["--host", host, "--port", str(port)]
    with running(command, log, environment(JAXRL_LLM_TOKEN=TOKEN)) as process:
        door = Server(f"http://{host}:{port}", process, log)
        wait_until_ready(door, TOKEN)
        yield door


@contextmanager
def another_host():
    """A network namespace with a cable to this one; skips where it cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("another network namespace needs root and iproute2's `ip`")
    name = f"jaxrl{os.getpid()}"
    near, far = f"jn{os.getpid()}", f"jf{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a network namespace cannot be made here: {made.stderr.strip()}")
    try:
        for line in (
            f"ip link add {near} type veth peer name {far} netns {name}",
            f"ip address add {HERE}/30 dev {near}",
            f"ip link set {near} up",
            f"ip -n {name} address add {THERE}/30 dev {far}",
            f"ip -n {name} link set {far} up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(line.split(), check=True, capture_output=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


ASK = """
import json, sys, urllib.error, urllib.request
url, path, body, token = sys.argv[1:]
request = urllib.request.Request(url + path, data=body.encode(), headers={"Authorization": "Bearer " + token, "Content-Type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=30) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as refused:
    print(refused.code, refused.read().decode())
except OSError as unreached:
    print("unreached", unreached)
"""


def test_another_host_reaches_generation_and_updates_but_no_other_endpoint(server, published, tmp_path):
    with another_host() as inside, proxy_before(server, tmp_path / "proxy", HERE) as door:

        def ask(url: str, path: str, body: object = None, token: str = TOKEN) -> str:
            command = [*inside, sys.executable, "-c", ASK, url, path, json.dumps(body), token]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

        rpc = {"method": "published_version"}
        vllm_port = server.url.rpartition(":")[2]
        assert ask(f"http://{HERE}:{vllm_port}", "/collective_rpc", rpc).startswith("unreached")
        assert ask(f"http://{THERE}:{vllm_port}", "/collective_rpc", rpc).startswith("unreached")
        assert ask(door.url, "/collective_rpc", rpc).startswith("404")
        assert ask(door.url, "/stage_status", token="guessed").startswith("401")
        assert ask(door.url, "/stage", {"path": published[2], "version": 2}).startswith("200")
        while '"staging"' in ask(door.url, "/stage_status"):
            pass
        assert ask(door.url, "/pause?mode=keep&clear_cache=true").startswith("200")
        assert ask(door.url, "/commit", {"version": 2, "mark": "a"}).startswith("200")
        assert ask(door.url, "/resume").startswith("200")
        sampling = {"max_tokens": 3, "logprobs": 0, "detokenize": False}
        answer = ask(door.url, "/generate", {"model": "policy", "token_ids": [5, 6, 7], "sampling_params": sampling})
    assert answer.startswith("200")
    (choice,) = json.loads(answer.removeprefix("200 "))["choices"]
    if names_versions():
        assert [span["version"] for span in choice["weight_versions"]] == ["2"]
    assert int(server.method("published_version")) == 2


def test_our_route_draws_what_vllms_own_draws_and_says_which_version_did(server, published):
    server.update(published[1], 1)
    sampling = {"n": 3, "max_tokens": 12, "logprobs": 0, "detokenize": False, "ignore_eos": True, "seed": 7}
    body = {"model": "policy", "token_ids": [5, 6, 7], "cache_salt": "v1"}
    ours = server.call(ROUTE, body | {"sampling_params": sampling})["choices"]
    theirs = server.call("/inference/v1/generate", body | {"sampling_params": sampling | {"output_kind": 2}})["choices"]
    assert len(ours) == len(theirs) == 3 and len({tuple(one["token_ids"]) for one in ours}) == 3
    for one, other in zip(ours, theirs):
        assert (one["index"], one["token_ids"], one["finish_reason"]) == (other["index"], other["token_ids"], "length")
        drawn = [entry["logprob"] for entry in other["logprobs"]["content"]]
        assert one["logprobs"] == pytest.approx(drawn, abs=1e-5) and len(drawn) == 12
        spans = [{"version": "1", "start": 0, "end": 12}] if names_versions() else None
        assert one["weight_versions"] == spans == other.get("weight_versions")


def test_our_route_refuses_what_is_no_request_and_draws_nothing_for_it(server):
    for content in ({}, {"token_ids": [5], "sampling_params": {"n": 0}}, {"token_ids": [], "sampling_params": {}}):
        with pytest.raises(Refusal) as refused:
            server.call(ROUTE, content)
        assert refused.value.code == 400, content


def test_a_server_without_development_endpoints_generates_and_names_what_updates_need(model, tmp_path):
    without = {**ON_TWO_CORES, "VLLM_SERVER_DEV_MODE": "0"}
    with (
        serving(model, tmp_path / "log", *TINY_ON_CPU, **without) as bare,
        proxy_before(bare, tmp_path / "proxy") as door,
    ):
        with pytest.raises(Refusal) as absent:
            bare.call("/collective_rpc", {"method": "stage_status"})
        assert absent.value.code == 404
        for path, body in (("/stage", {"path": "/nowhere", "version": 1}), ("/commit", {"version": 1, "mark": "a"})):
            with pytest.raises(Refusal) as refusal:
                door.call(path, body, token=TOKEN)
            assert refusal.value.code == 409
            assert "VLLM_SERVER_DEV_MODE=1" in refusal.value.text
        body = {"model": "policy", "token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "detokenize": False}}
        (choice,) = door.call("/generate", body, token=TOKEN)["choices"]
        assert len(choice["token_ids"]) == 2
