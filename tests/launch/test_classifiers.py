"""launch/classifiers.sh: a server for each GPU, which is started once, asked, and stopped."""

import shlex
import time

import pytest
from stand_ins import Machine, commands

# A server waits until it is ended; it notes its GPU, its port and the rest.
PYTHON = 'echo "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS $*" >>"$ANSWERS/servers"; exec sleep 60'


@pytest.fixture
def machine(tmp_path):
    variables = {
        "MODEL": "some/classifier",
        "GPUS": "2",
        "PYTHON": "some-python",
        "PORT": "8100",
        "POLL_S": "0.05",
        "STOP_S": "10",
    }
    made = Machine(home=tmp_path, variables=variables)
    made.tool("some-python", PYTHON)
    made.tool("curl")
    yield made
    made.run("classifiers.sh", "stop")


def test_a_server_for_each_gpu_is_started_once_and_stopped(machine):
    done = machine.run("classifiers.sh", "start", CUDA_VISIBLE_DEVICES="3,5", MORE="--max-model-len 4096")
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout) == ["--gin=PARTITION_URLS=('http://127.0.0.1:8100','http://127.0.0.1:8101',)"]
    file, until = machine.home / "answers" / "servers", time.monotonic() + 10
    while not file.exists() or len(file.read_text().splitlines()) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    served = (
        "-m vllm.entrypoints.openai.api_server --model some/classifier --served-model-name similarity --runner pooling"
    )
    assert sorted(file.read_text().splitlines()) == [
        f"{gpu} 1 {served} --host 127.0.0.1 --port {port} --max-model-len 4096" for gpu, port in ((3, 8100), (5, 8101))
    ]
    again = machine.run("classifiers.sh", "start", CUDA_VISIBLE_DEVICES="3,5")
    assert again.stderr.count("runs already") == 2 and len(file.read_text().splitlines()) == 2
    assert machine.run("classifiers.sh", "status").stderr.count("runs (process") == 2
    assert machine.run("classifiers.sh", "stop").stderr.count("has ended") == 2
    assert machine.run("classifiers.sh", "status").stderr.count("does not run") == 2


def test_this_packages_server_is_another_program_and_a_dry_run_starts_nothing(machine):
    done = machine.run("classifiers.sh", "--dry_run", "start", SERVER="own", MACRO="REWARD_URLS")
    first, second, *waits, binding = commands(done.stdout)
    assert first[1:4] == ["start", "classifier-0", "env"] and second[2] == "classifier-1"
    assert first[-9:] == [
        "jaxrl_llm.rewards.services.classifier_server", "--model", "some/classifier", "--device", "cuda", "--host", "127.0.0.1", "--port", "8100",
    ]  # fmt: skip
    assert [wait[:2] for wait in waits] == [["curl", f"http://127.0.0.1:{port}/health"] for port in (8100, 8101)]
    assert binding == ["--gin=REWARD_URLS=('http://127.0.0.1:8100','http://127.0.0.1:8101',)"]
    assert not (machine.home / "answers" / "servers").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SERVER": "other"}, "SERVER must be vllm or own (got other)"),
        (
            {"CUDA_VISIBLE_DEVICES": "0"},
            "GPUS=2 servers need as many GPUs, and CUDA_VISIBLE_DEVICES names 1: lower GPUS",
        ),
        ({"MODEL": ""}, "set MODEL"),
        ({"GPUS": "0"}, "GPUS must be an integer >= 1"),
    ],
)
def test_what_cannot_be_started_is_refused(machine, variables, said):
    done = machine.run("classifiers.sh", "start", **variables)
    assert done.returncode == 2 and said in done.stderr
    assert not (machine.home / "answers" / "servers").exists()


def test_a_server_that_ends_is_named(machine):
    machine.tool("some-python", "exit 1")
    machine.tool("curl", "exit 22")
    done = machine.run("classifiers.sh", "start")
    assert done.returncode == 2 and "classifier-0 has ended" in done.stderr
