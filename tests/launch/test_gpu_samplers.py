"""launch/gpu_samplers.sh, with an ssh that runs commands here: samplers are started, kept, asked and stopped for real."""

import contextlib
import json
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
  *tensor_sizes*) exec python3 "$@" ;;
  "-m pip"*) ;;
  "-m vllm"*)
    [ -z "${JAXRL_LLM_TOKEN:-}" ] || touch "$ANSWERS/leaked"
    echo "${CUDA_VISIBLE_DEVICES:-all} ${VLLM_PORT:-none} ${OMP_NUM_THREADS:-none}" >>"$ANSWERS/devices"
    exec sleep 60 ;;
  *) exec sleep 60 ;;
esac
"""


SERVERS = [(host, number) for host in ("me@gpu1", "gpu2") for number in (0, 1)]


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
        "SAMPLER_GPUS": "2",
    }
    made = Machine(home=tmp_path, variables=variables)
    made.tool("ssh", SSH)
    made.tool("vllm-python", VLLM_PYTHON)
    made.tool("learner-python")
    made.tool("curl", f"grep -q 'Bearer {TOKEN}'")
    yield made
    made.run("gpu_samplers.sh", "stop")


def living(machine: Machine, host: str, number: int = 0) -> set[str]:
    """The processes of one sampler of the host: those of its session that are no zombies."""
    group = (machine.home / "hosts" / host / ".jaxrl_llm" / f"sampler-{number}.pid").read_text().split()[0]
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, facts = stat.read_text().split(" ", 1)
            state, _, _, session = facts.rpartition(") ")[2].split()[:4]
            found |= {number} if session == group and state not in "ZX" else set()
    return found


def test_samplers_are_started_once_and_the_learner_is_given_their_addresses(machine):
    done = machine.run("gpu_samplers.sh", "run", *GIN)
    assert done.returncode == 0, done.stderr
    calls = machine.calls()
    (learn,) = [call for call in calls if call[0] == "learner-python"]
    assert learn[1:] == [
        "-m", "jaxrl_llm.launch", "--distributed", "--gin=VLLM_SPAWN=False",
        "--gin=VLLM_URLS=('http://gpu1:9000','http://gpu1:9001','http://gpu2:9000','http://gpu2:9001',)", "--gin=PUBLICATION='/nfs/publication'",
        "--gin=vllm.VllmSampler.proxied=True",
        "--gin=vllm.VllmSampler.api_key_variable='JAXRL_LLM_TOKEN'", *GIN, "--gin_file=gin/samplers/vllm.gin",
    ]  # fmt: skip
    assert not any(TOKEN in word for call in calls for word in call), "lists of processes show words"
    for host in ("me@gpu1", "gpu2"):
        secret = machine.home / "hosts" / host / ".jaxrl_llm_token"
        assert secret.read_text() == TOKEN and secret.stat().st_mode & 0o777 == 0o600
    running = [living(machine, host, number) for host, number in SERVERS]
    assert all(running)
    again = machine.run("gpu_samplers.sh", "start")
    assert again.returncode == 0 and again.stderr.count("runs already") == 4
    assert all(before & living(machine, *server) for before, server in zip(running, SERVERS, strict=True))

    served = wait_for_servers(machine, calls)
    vllm = next(call for call in served if "vllm.entrypoints.openai.api_server" in call)
    assert vllm[3:] == [
        "--model", "/models/qwen", "--served-model-name", "policy", "--host", "127.0.0.1", "--port", "8000",
        "--load-format", "dummy", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
        "--hf-overrides", '{"head_dtype": "float32"}', "--tensor-parallel-size", "1", "--enable-scale-out", "--middleware", "jaxrl_llm.publication.vllm_route.TokenRoute", "--worker-extension-cls",
        "jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension",
    ]  # fmt: skip
    asked_at = sorted(call[call.index("--port") + 1] for call in served if "vllm.entrypoints.openai.api_server" in call)
    assert asked_at == ["8000", "8000", "8001", "8001"]
    proxies = [call for call in served if "jaxrl_llm.samplers.vllm_proxy" in call]
    listens = sorted((call[-3], call[-1], call[-5]) for call in proxies)
    assert listens == [(host, f"900{n}", f"http://127.0.0.1:800{n}") for host in ("gpu1", "gpu2") for n in (0, 1)]
    devices = sorted((machine.home / "answers" / "devices").read_text().splitlines())
    assert devices == ["0 none 1", "0 none 1", "1 none 1", "1 none 1"], (
        "a GPU each, no VLLM_PORT, which is vLLM's own too, and one thread of PyTorch"
    )
    assert not (machine.home / "answers" / "leaked").exists(), "vLLM needs no token"

    status = machine.run("gpu_samplers.sh", "status")
    assert status.stderr.count("runs (process") == 4 and "http://gpu2:9001 answers" in status.stderr
    assert machine.run("gpu_samplers.sh", "stop").returncode == 0
    deadline = time.monotonic() + 5
    while any(living(machine, *server) for server in SERVERS):
        assert time.monotonic() < deadline, "vLLM and proxy end with the sampler"
        time.sleep(0.02)


def wait_for_servers(machine: Machine, calls: list[list[str]]) -> list[list[str]]:
    """The calls of vLLM's Python, when both samplers have made theirs."""
    deadline = time.monotonic() + 20
    served: list[list[str]] = []
    while len(served) < 8:
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


def test_the_proxy_has_ended_before_vllm_is_asked_to(machine):
    """It hands back what vLLM has in flight; vLLM is out of reach of a signal to the sampler's process group."""
    note = """trap 'echo "$NAME" >>"$ANSWERS/ends"; exit 0' TERM; touch "$ANSWERS/begun-$NAME"; sleep 60 & wait"""
    machine.tool(
        "vllm-python",
        f'case "$*" in *importlib*) echo 0.32.1 ;; "-m vllm"*) NAME=vllm; {note} ;; *proxy*) NAME=proxy; {note.replace("echo", "sleep 0.5; echo")} ;; *) exit 3 ;; esac',
    )
    ends, begun = (
        machine.home / "answers" / "ends",
        [machine.home / "answers" / f"begun-{n}" for n in ("vllm", "proxy")],
    )
    background = ["background.sh", "start", "sampler-0", str(LAUNCH / "sampler.sh")]
    assert machine.run(*background).returncode == 0
    limit = time.monotonic() + 20
    while not all(file.exists() for file in begun):
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert machine.run("background.sh", "stop", "sampler-0").returncode == 0
    assert ends.read_text().split() == ["proxy", "vllm"]


@pytest.mark.slow
def test_scaling_starts_the_first_samplers_ends_the_others_and_lists_who_is_there(machine):
    urls = machine.home / "urls"
    scale = lambda count: machine.run("gpu_samplers.sh", "scale", count, URLS_FILE=str(urls))  # noqa: E731
    assert machine.run("gpu_samplers.sh", "setup").returncode == 0
    done = scale("3")
    assert done.returncode == 0, done.stderr
    assert urls.read_text().split() == ["http://gpu1:9000", "http://gpu1:9001", "http://gpu2:9000"]
    assert all(living(machine, *server) for server in SERVERS[:3])
    kept = living(machine, *SERVERS[0])
    assert scale("1").returncode == 0 and urls.read_text().split() == ["http://gpu1:9000"]
    assert living(machine, *SERVERS[0]) >= kept & living(machine, *SERVERS[0]) != set()
    assert not any(living(machine, *server) for server in SERVERS[1:3])
    for wrong, message in (
        ("5", "room for 4 samplers on 2 hosts (got 5)"),
        ("0", "COUNT must be an integer >= 1"),
        ("x", "COUNT must be"),
    ):
        refused = scale(wrong)
        assert refused.returncode == 2 and message in refused.stderr
    assert "set URLS_FILE" in machine.run("gpu_samplers.sh", "scale", "1").stderr


def test_a_dry_run_prints_the_commands_and_calls_nothing(machine):
    done = machine.run("gpu_samplers.sh", "--dry_run", "run", *GIN)
    assert done.returncode == 0, done.stderr
    assert machine.calls() == [] and TOKEN not in done.stdout + done.stderr
    printed = commands(done.stdout)
    starts = [shlex.split(c[-1]) for c in printed if c[0] == "ssh" and "background.sh" in c[-1]]
    assert [(words[2], words[7]) for words in starts] == [
        (f"LISTEN={host}", f"NUMBER={number}") for host in ("gpu1", "gpu2") for number in (0, 1)
    ]
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
        ({"SAMPLER_GPUS": "8", "TENSOR_PARALLEL": "3"}, "leaves 2 of SAMPLER_GPUS=8 idle"),
    ],
)
def test_what_is_missing_or_unsafe_is_named_before_anything_is_done(machine, variables, message):
    done = machine.run("gpu_samplers.sh", "run", *GIN, **variables)
    assert done.returncode == 2 and message in done.stderr
    assert machine.calls() == []


def test_a_tensor_size_that_a_hosts_model_does_not_take_starts_no_server(machine, tmp_path):
    """The host's own Python reads config.json there: 28 heads are not shared by 8 GPUs."""
    machine.python("python3")
    sizes = {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    machine.run("gpu_samplers.sh", "setup")
    machine.calls()
    given = {"MODEL": str(tmp_path), "SAMPLER_GPUS": "8"}
    done = machine.run("gpu_samplers.sh", "start", **given, TENSOR_PARALLEL="8")
    assert done.returncode == 2 and "28 heads and 4 KV heads" in done.stderr and "it may be 1, 2, 4\n" in done.stderr
    assert not list(tmp_path.glob("hosts/*/.jaxrl_llm"))
    machine.tool("nvidia-smi", "seq 0 1")
    done = machine.run("gpu_samplers.sh", "start", **given, TENSOR_PARALLEL="4")
    assert done.returncode == 2 and "needs 8 GPUs, and there are 2 here: lower SAMPLER_GPUS" in done.stderr
    assert not list(tmp_path.glob("hosts/*/.jaxrl_llm"))


def test_a_server_takes_its_share_of_the_gpus_that_are_left_to_its_host(machine):
    given = {"NUMBER": "1", "TENSOR_PARALLEL": "2", "CUDA_VISIBLE_DEVICES": "7,5,GPU-a,3"}
    (served, proxy) = commands(machine.run("sampler.sh", "--dry_run", **given).stdout)
    assert "CUDA_VISIBLE_DEVICES=GPU-a,3" in served and served[served.index("--port") + 1] == "8001"
    assert proxy[-5:] == ["http://127.0.0.1:8001", "--host", "127.0.0.1", "--port", "9001"]
    (served, _) = commands(machine.run("sampler.sh", "--dry_run").stdout)
    assert not any("CUDA_VISIBLE_DEVICES" in word for word in served) and served[served.index("--port") + 1] == "8000"


def test_each_host_has_one_relay_that_ends_with_its_first_server(machine):
    """The first server of a host starts it, and the learner is told its port; a relay that fails ends nothing."""
    given = {"RELAY_PORT": "9100", "NUMBER": "0", "LISTEN": "10.0.0.5"}
    (_, _, relay) = commands(machine.run("sampler.sh", "--dry_run", **given).stdout)
    alone = machine.run("sampler.sh", **given | {"ONLY": "relay", "RELAY_PORT": ""})
    assert alone.returncode == 2 and "RELAY_PORT" in alone.stderr
    assert relay == [
        "vllm-python", "-m", "jaxrl_llm.publication.relays.server", "--folder", "/dev/shm/jaxrl_llm_relay", "--host", "10.0.0.5",
        "--port", "9100",
    ]  # fmt: skip
    assert len(commands(machine.run("sampler.sh", "--dry_run", **given | {"NUMBER": "1"}).stdout)) == 2
    printed = commands(machine.run("gpu_samplers.sh", "--dry_run", "run", *GIN, RELAY_PORT="9100").stdout)
    starts = [shlex.split(c[-1]) for c in printed if c[0] == "ssh" and "background.sh" in c[-1]]
    assert len(starts) == 4 and all("RELAY_PORT=9100" in words for words in starts)
    assert "--gin=VLLM_RELAY_PORT=9100" in printed[-1]
    machine.tool(
        "vllm-python",
        'case "$*" in *importlib*) echo 0.32.0 ;; *relays*) exit 3 ;; "-m vllm"*) sleep 1; exit 9 ;; *) exec sleep 60 ;; esac',
    )
    done = machine.run("sampler.sh", RELAY_PORT="9100")
    assert done.returncode == 9, "what vLLM ended with, a second after the relay"
