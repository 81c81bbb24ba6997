"""launch/gpu_samplers.sh, with an ssh that runs commands here: samplers are started, kept, asked and stopped for real."""

import contextlib
import shlex
import time
from pathlib import Path

import pytest
from stand_ins import LAUNCH, ROOT, Machine, commands

TOKEN = "0123456789abcdef0123"
GIN = ["--gin_file=gin/grpo_gsm8k.gin", "--gin=RUN_DIR='my run'"]

# A host is a folder of its own; ssh's words are options, host, command.
SSH = """
[ "$1" = -o ] && shift 2
mkdir -p "$HOME/hosts/$1" && cd "$HOME/hosts/$1" && HOME=$PWD && export HOME
case "$2" in *" tar -x"*) cat >/dev/null; mkdir -p jaxrl_llm && ln -sfn "$LAUNCH" jaxrl_llm/launch ;; *) bash -c "$2" ;; esac
"""
# vLLM's Python: vLLM and the proxy wait until they are ended.
VLLM_PYTHON = """
case "$*" in
  *importlib*) echo 0.32.1 ;;
  "-m pip"*) ;;
  "-m vllm"*) [ -z "${JAXRL_LLM_TOKEN:-}" ] || touch "$ANSWERS/leaked"; exec sleep 60 ;;
  *) exec sleep 60 ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no committed source to copy")
    variables = {
        "SAMPLER_HOSTS": "me@gpu1 gpu2",
        "MODEL": "/models/qwen",
        "PUBLICATION": "/nfs/publication",
        "JAXRL_LLM_TOKEN": TOKEN,
        "SAMPLER_PYTHON": "vllm-python",
        "PYTHON": "learner-python",
        "STOP_S": "10",
        "POLL_S": "0.05",
        "LAUNCH": str(LAUNCH),
        "TENSOR_PARALLEL": "2",
    }
    made = Machine(home=tmp_path, variables=variables)
    made.tool("ssh", SSH)
    made.tool("vllm-python", VLLM_PYTHON)
    made.tool("learner-python")
    made.tool("curl", f"grep -q 'Bearer {TOKEN}'")
    yield made
    made.run("gpu_samplers.sh", "stop")


def living(machine: Machine, host: str) -> set[str]:
    """The processes of the host's sampler: those of its group that are no zombies."""
    group = (machine.home / "hosts" / host / ".jaxrl_llm" / "sampler.pid").read_text().split()[0]
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, facts = stat.read_text().split(" ", 1)
            state, _, its_group = facts.rpartition(") ")[2].split()[:3]
            found |= {number} if its_group == group and state not in "ZX" else set()
    return found


def test_samplers_are_started_once_and_the_learner_is_given_their_addresses(machine):
    done = machine.run("gpu_samplers.sh", "run", *GIN)
    assert done.returncode == 0, done.stderr
    calls = machine.calls()
    (learn,) = [call for call in calls if call[0] == "learner-python"]
    assert learn[1:] == [
        "-m", "jaxrl_llm.launch", "--distributed", "--gin=VLLM_SPAWN=False",
        "--gin=VLLM_URLS=('http://gpu1:9000','http://gpu2:9000',)", "--gin=PUBLICATION='/nfs/publication'",
        "--gin=vllm.VllmSampler.proxied=True",
        "--gin=vllm.VllmSampler.api_key_variable='JAXRL_LLM_TOKEN'", *GIN, "--gin_file=gin/samplers/vllm.gin",
    ]  # fmt: skip
    assert not any(TOKEN in word for call in calls for word in call), "lists of processes show words"
    for host in ("me@gpu1", "gpu2"):
        secret = machine.home / "hosts" / host / ".jaxrl_llm_token"
        assert secret.read_text() == TOKEN and secret.stat().st_mode & 0o777 == 0o600
    running = [living(machine, host) for host in ("me@gpu1", "gpu2")]
    assert all(running)
    again = machine.run("gpu_samplers.sh", "start")
    assert again.stderr.count("sampler runs already") == 2
    assert all(before & living(machine, host) for before, host in zip(running, ("me@gpu1", "gpu2"), strict=True))

    served = wait_for_servers(machine, calls)
    vllm = next(call for call in served if "vllm.entrypoints.openai.api_server" in call)
    assert vllm[3:] == [
        "--model", "/models/qwen", "--served-model-name", "policy", "--host", "127.0.0.1", "--port", "8000",
        "--load-format", "dummy", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
        "--hf-overrides", '{"head_dtype": "float32"}', "--tensor-parallel-size", "2", "--enable-scale-out", "--middleware", "jaxrl_llm.publication.vllm_route.TokenRoute", "--worker-extension-cls",
        "jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension",
    ]  # fmt: skip
    listens = sorted(call[-3] for call in served if "jaxrl_llm.samplers.vllm.proxy" in call)
    assert listens == ["gpu1", "gpu2"]
    assert not (machine.home / "answers" / "leaked").exists(), "vLLM needs no token"

    status = machine.run("gpu_samplers.sh", "status")
    assert status.stderr.count("sampler runs (process") == 2 and "http://gpu2:9000 answers" in status.stderr
    assert machine.run("gpu_samplers.sh", "stop").returncode == 0
    deadline = time.monotonic() + 5
    while any(living(machine, host) for host in ("me@gpu1", "gpu2")):
        assert time.monotonic() < deadline, "vLLM and proxy end with the sampler"
        time.sleep(0.02)


def wait_for_servers(machine: Machine, calls: list[list[str]]) -> list[list[str]]:
    """The calls of vLLM's Python, when both samplers have made theirs."""
    deadline = time.monotonic() + 20
    served: list[list[str]] = []
    while len(served) < 4:
        served += [
            c
            for c in (*calls, *machine.calls("vllm-python"))
            if c[0] == "vllm-python" and c[1] == "-m" and c[2] != "pip"
        ]
        calls = []
        assert time.monotonic() < deadline, served
        time.sleep(0.02)
    return served


def test_a_sampler_ends_when_one_of_its_two_parts_does(machine):
    machine.tool(
        "vllm-python", 'case "$*" in *importlib*) echo 0.29.0 ;; "-m vllm"*) exit 9 ;; *) exec sleep 60 ;; esac'
    )
    done = machine.run("sampler.sh")
    assert not any("--enable-scale-out" in call for call in machine.calls()), "vLLM knows it from 0.30 on"
    assert done.returncode == 9 and "vLLM or the proxy ended (exit code 9)" in done.stderr


def test_a_dry_run_prints_the_commands_and_calls_nothing(machine):
    done = machine.run("gpu_samplers.sh", "--dry_run", "run", *GIN)
    assert done.returncode == 0, done.stderr
    assert machine.calls() == [] and TOKEN not in done.stdout + done.stderr
    printed = commands(done.stdout)
    starts = [shlex.split(c[-1]) for c in printed if c[0] == "ssh" and "background.sh" in c[-1]]
    assert [words[2] for words in starts] == ["LISTEN=gpu1", "LISTEN=gpu2"]
    assert printed[-1][0] == str(LAUNCH / "learner.sh") and printed[-1][-3:-1] == GIN


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SAMPLER_HOSTS": ""}, "set SAMPLER_HOSTS"),
        ({"SAMPLER_HOSTS": "-oProxyCommand=x gpu2"}, "names, not options"),
        ({"SAMPLER_HOSTS": "gpu1;ls"}, "may hold letters, digits"),
        ({"SAMPLER_ADDRESSES": "10.0.0.1"}, "has 1 addresses for 2 hosts"),
        ({"MODEL": ""}, "set MODEL"),
        ({"JAXRL_LLM_TOKEN": "x"}, "random token of at least 16"),
    ],
)
def test_what_is_missing_or_unsafe_is_named_before_anything_is_done(machine, variables, message):
    done = machine.run("gpu_samplers.sh", "run", *GIN, **variables)
    assert done.returncode == 2 and message in done.stderr
    assert machine.calls() == []
