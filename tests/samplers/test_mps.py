"""CUDA's multi-process service is started with a run whose servers share the learner's GPU, and ends with it; a script plays the service."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm import launch
from jaxrl_llm.samplers.servers.local_server import share_gpus
from jaxrl_llm.samplers.vllm.local_server import LocalServers
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

linux = pytest.mark.skipif(sys.platform != "linux", reason="the service is Linux's")
SERVICE = """#!/bin/sh
echo "given $@, sees ${CUDA_VISIBLE_DEVICES:-all}, secret ${HF_TOKEN:-none}"
if [ "$MPS_FAILS" = 1 ]; then echo "Cannot find MPS control daemon process" > "$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; fi
echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/pid"
touch "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 100
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(SERVICE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    return program


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@linux
@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is killed"])
def test_the_service_is_there_for_the_run_and_its_servers_and_ends_with_it(service, killed):
    code = (
        "import os, time\n"
        "from jaxrl_llm.samplers.servers.local_server import share_gpus; from jaxrl_llm.samplers.vllm.local_server import LocalServers\n"
        "share_gpus(LocalServers()); folder = os.environ['CUDA_MPS_PIPE_DIRECTORY']; share_gpus(LocalServers())\n"
        "own = LocalServers().environment_of(0)['CUDA_MPS_PIPE_DIRECTORY']\n"
        "print(folder, own, open(folder + '/pid').read().strip(), open(folder + '/output.log').read().strip(), sep='|', flush=True)\n"
        f"time.sleep({60 if killed else 0})\n"
    )
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "hidden"}
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=given)
    assert run.stdout is not None
    folder, own, pid, said = run.stdout.readline().strip().split("|")
    assert folder == own and said == "given -f, sees all, secret none"
    if killed:
        assert alive(int(pid))
        run.kill()
    assert run.wait(20) == (-9 if killed else 0)
    limit = time.monotonic() + 5
    while alive(int(pid)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not alive(int(pid)) and Path(folder).exists() == killed
    run.stdout.close()


@linux
def test_a_service_that_does_not_start_is_told_with_its_log(service, monkeypatch):
    monkeypatch.setenv("MPS_FAILS", "1")
    with pytest.raises(RuntimeError, match=r"did not start .*VLLM_MPS = False: Cannot find MPS control daemon process"):
        share_gpus(LocalServers())
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_without_the_drivers_program_the_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with pytest.raises(FileNotFoundError, match=r"needs nvidia-cuda-mps-control, .*or set VLLM_MPS = False"):
        share_gpus(LocalServers())


def test_a_service_that_runs_is_taken_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    share_gpus(LocalServers())
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path)


@pytest.mark.parametrize(
    ("spawn", "mps", "several"), [(True, True, False), (True, False, False), (False, True, False), (True, True, True)]
)
def test_a_run_starts_it_before_it_looks_at_devices_where_it_is_asked_for(monkeypatch, spawn, mps, several):
    began = []
    monkeypatch.setattr("jaxrl_llm.samplers.servers.served.share_gpus", lambda servers: began.append(True))
    monkeypatch.setattr(launch, "several", lambda distributed: several)
    urls = () if spawn else ("http://127.0.0.1:1",)
    sampler = VllmSampler(spawn=spawn, urls=urls, local=LocalServers(mps=mps))
    launch._beforehand(type("Run", (), {"sampler": sampler})(), False)
    assert bool(began) == (spawn and mps and not several)
    launch._beforehand(object(), False)  # a run without a sampler
