"""launch/tpu_pod.sh: the very commands that gcloud is given."""

import shlex
import tarfile

import pytest
from stand_ins import ROOT, Machine, commands

POD = {
    "PROJECT": "my-project",
    "ZONE": "us-east5-a",
    "TPU_NAME": "pod",
    "TPU_TYPE": "v6e-64",
    "TPU_RUNTIME": "v2-alpha-tpuv6e",
}
PLACE = ["--project=my-project", "--zone=us-east5-a"]
QUEUED = ["gcloud", "compute", "tpus", "queued-resources"]
NODES = ["gcloud", "compute", "tpus", "tpu-vm"]
TYPE = ["--accelerator-type=v6e-64", "--runtime-version=v2-alpha-tpuv6e"]
LIST = [*QUEUED, "list", *PLACE, r"--filter=name~(^|/)pod$", "--format=value(state.state)"]
DELETE = [*QUEUED, "delete", "pod", *PLACE, "--force", "--quiet"]
GIN = ["--gin_file=gin/grpo_gsm8k.gin", "--gin=RUN_DIR='gs://bucket/my run'"]

# The state is what the file says; a creation makes it ACTIVE, a deletion empties it.
CLOUD = """
case "$*" in
  *"queued-resources list"*) cat "$HOME/state" 2>/dev/null || : ;;
  *"queued-resources create"*) echo ACTIVE >"$HOME/state" ;;
  *"queued-resources delete"*) : >"$HOME/state" ;;
  *"tpu-vm list"*) cat "$HOME/nodes" 2>/dev/null || echo READY ;;
  *"tpu-vm scp"*.tar.gz*) cp "$5" "$HOME/copied.tar.gz" ;;
  *"tpu-vm scp"*token*) stat -c %a "$5" >"$HOME/mode"; cat "$5" >"$HOME/token" ;;
esac
"""


@pytest.fixture
def machine(tmp_path) -> Machine:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no committed source to copy")
    made = Machine(home=tmp_path, variables=dict(POD))
    made.tool("gcloud", CLOUD)
    return made


def changes(machine: Machine) -> list[list[str]]:
    """The calls that are no question."""
    return [call for call in machine.calls("gcloud") if "list" not in call]


def ssh(node: str, command: str, worker: str = "all") -> list[str]:
    return [*NODES, "ssh", node, *PLACE, f"--worker={worker}", f"--command={command}"]


def test_a_pod_is_asked_for_by_a_queued_resource_once(machine):
    done = machine.run("tpu_pod.sh", "create", SPOT="1", TPU_ACCOUNT="me@x.iam")
    assert done.returncode == 0, done.stderr
    create = [*QUEUED, "create", "pod", *PLACE, *TYPE, "--node-id=pod", "--spot", "--service-account=me@x.iam"]
    assert machine.calls("gcloud") == [LIST, create, LIST]
    done = machine.run("tpu_pod.sh", "create")
    assert done.returncode == 0 and "pod is there already: ACTIVE" in done.stderr
    assert changes(machine) == []


COMPILE = ["python3", "-m", "jaxrl_llm.launch", "--dry_run"]


def test_programs_are_compiled_for_a_pod_before_it_is_asked_for(machine):
    machine.tool("python3")
    done = machine.run("tpu_pod.sh", "up", *GIN)
    assert done.returncode == 0, done.stderr
    calls = [call for call in machine.calls("python3", "gcloud") if "list" not in call]
    assert calls[0][:2] == ["python3", "-c"] and "libtpu" in calls[0][2]
    assert calls[1:3] == [
        [*COMPILE, "--topology=v6e-64", *GIN],
        [*QUEUED, "create", "pod", *PLACE, *TYPE, "--node-id=pod"],
    ]
    done = machine.run("tpu_pod.sh", "up", *GIN)
    assert done.returncode == 0 and machine.calls("python3") == []  # the pod is there


def test_a_pod_that_is_too_small_is_not_asked_for(machine):
    machine.tool("python3", 'case "$*" in *launch*) echo "error: the update needs 40 GiB" >&2; exit 1 ;; esac')
    done = machine.run("tpu_pod.sh", "create", *GIN, TPU_SLICES="2")
    assert (
        done.returncode == 2 and "does not do on 2*v6e-64: see above; CHECK=0" in done.stderr and changes(machine) == []
    )
    assert machine.run("tpu_pod.sh", "create", *GIN, CHECK="0").returncode == 0 and len(changes(machine)) == 1


@pytest.mark.parametrize(
    ("kind", "why"), [("v6e-64", "has no jaxrl-llm[aot-tpu]"), ("v5litepod-16", "for v6e and v5p alone")]
)
def test_a_pod_whose_memory_cannot_be_known_is_asked_for_with_a_warning(machine, kind, why):
    machine.tool("python3", "exit 1")
    done = machine.run("tpu_pod.sh", "create", *GIN, TPU_TYPE=kind)
    assert done.returncode == 0 and f"memory on {kind} is not known" in done.stderr and why in done.stderr
    assert f"--accelerator-type={kind}" in changes(machine)[0]


def test_slices_are_nodes_of_one_queued_resource_and_all_hosts_are_told(machine):
    (machine.home / "state").write_text("ACTIVE\n")
    done = machine.run("tpu_pod.sh", "run", *GIN, TPU_SLICES="2", ENVIRONMENT="HF_HOME UNSET", HF_HOME="/mnt/my hub")
    assert done.returncode == 0, done.stderr
    calls = changes(machine)
    assert [call[5] for call in calls] == ["pod-0", "pod-1"] and calls[0][:5] == [*NODES, "ssh"]
    (option,) = [word for word in calls[0] if word.startswith("--command=")]
    words = shlex.split(option.removeprefix("--command="))
    start = ["launch/background.sh", "start", "learner", "launch/learner.sh", *GIN]
    assert words == ["cd", "jaxrl_llm", "&&", "env", "HF_HOME=/mnt/my hub", *start]
    machine.run("tpu_pod.sh", "run", *GIN, JAXRL_LLM_COMPILED="gs://bucket/compiled")
    (option,) = [word for word in changes(machine)[0] if word.startswith("--command=")]
    assert shlex.split(option.removeprefix("--command="))[3:6] == [
        "env",
        "JAXRL_LLM_COMPILED=gs://bucket/compiled",
        start[0],
    ]
    machine.run("tpu_pod.sh", "delete", TPU_SLICES="2")
    machine.calls()
    machine.run("tpu_pod.sh", "create", TPU_SLICES="2")
    assert changes(machine) == [[*QUEUED, "create", "pod", *PLACE, *TYPE, "--node-count=2", "--node-prefix=pod"]]


def test_setup_copies_the_committed_source_and_a_token_that_its_owner_alone_reads(machine):
    token = "0123456789abcdef0123"
    done = machine.run("tpu_pod.sh", "setup", JAXRL_LLM_TOKEN=token)
    assert done.returncode == 0, done.stderr
    source, secret, install = changes(machine)
    assert source[:5] == [*NODES, "scp"] and source[6:] == ["pod:jaxrl_llm.tar.gz", *PLACE, "--worker=all"]
    assert secret[6:] == ["pod:.jaxrl_llm_token", *PLACE, "--worker=all", "--scp-flag=-p"]
    assert not any(token in word for call in (source, secret, install) for word in call), (
        "lists of processes show words"
    )
    assert (machine.home / "token").read_text() == token and (machine.home / "mode").read_text() == "600\n"
    with tarfile.open(machine.home / "copied.tar.gz") as archive:
        assert {"pyproject.toml", "jaxrl_llm/launch.py", "gin/base.gin"} <= set(archive.getnames())
    command = install[-1]
    assert (
        "uv venv --python 3.12 .venv" in command
        and '-e ".[tpu,datasets]"' in command
        and "installed already" in command
    )


@pytest.mark.parametrize("state", ["SUSPENDED", "ACTIVE"])
def test_a_pod_that_was_preempted_is_made_anew_and_the_same_run_goes_on(machine, state):
    (machine.home / "state").write_text(f"{state}\n")
    if state == "ACTIVE":  # a node may be gone before the queued resource knows it
        (machine.home / "nodes").write_text("PREEMPTED\n")
    done = machine.run("tpu_pod.sh", "resume", *GIN, SPOT="1")
    assert done.returncode == 0, done.stderr
    create = [*QUEUED, "create", "pod", *PLACE, *TYPE, "--node-id=pod", "--spot"]
    assert [call[:5] if call[3] == "tpu-vm" else call for call in changes(machine)] == [
        DELETE, create, [*NODES, "scp"], [*NODES, "ssh"], [*NODES, "ssh"],
    ]  # fmt: skip


def test_resuming_a_pod_that_is_whole_makes_nothing_anew(machine):
    (machine.home / "state").write_text("ACTIVE\n")
    done = machine.run("tpu_pod.sh", "resume", *GIN)
    assert done.returncode == 0, done.stderr
    assert [call[4] for call in changes(machine)] == ["scp", "ssh", "ssh"]


def test_what_became_of_the_run_is_asked_of_the_hosts(machine):
    (machine.home / "state").write_text("ACTIVE\n")
    keeper = "jaxrl_llm/launch/background.sh"
    for action, worker in (("status", "0"), ("tail", "0"), ("stop", "all")):
        assert machine.run("tpu_pod.sh", action).returncode == 0
        assert changes(machine) == [ssh("pod", f"{keeper} {action} learner", worker)]
    assert machine.run("tpu_pod.sh", "delete").returncode == 0
    assert changes(machine) == [DELETE]
    done = machine.run("tpu_pod.sh", "delete")
    assert done.returncode == 0 and "there is no pod" in done.stderr and changes(machine) == []


def test_a_host_that_could_not_be_told_to_stop_is_an_error(machine):
    machine.tool("gcloud", 'case "$*" in *"ssh pod-0"*) exit 7 ;; esac')
    done = machine.run("tpu_pod.sh", "stop", TPU_SLICES="2")
    assert done.returncode == 7 and len(changes(machine)) == 2


def test_a_pod_is_waited_for_until_it_is_ready(machine):
    states = "GONE PROVISIONING ACTIVE"
    machine.tool(
        "gcloud",
        f"""
case "$*" in *list*)
  echo >>"$HOME/asked"; set -- {states}; shift $(($(wc -l <"$HOME/asked") - 1))
  [ "$1" = GONE ] || echo "$1" ;;
esac""",
    )
    done = machine.run("tpu_pod.sh", "create", POLL_S="0.01")
    assert done.returncode == 0, done.stderr
    assert "pod is there already: PROVISIONING" not in done.stderr and done.stderr.endswith("pod is ready\n")
    machine.tool("gcloud", 'case "$*" in *list*) echo PROVISIONING ;; esac')
    done = machine.run("tpu_pod.sh", "create", POLL_S="0.01", WAIT_S="0")
    assert done.returncode == 2 and "still PROVISIONING after 0 s" in done.stderr
    machine.tool("gcloud", 'case "$*" in *list*) echo "no permission" >&2; exit 1 ;; esac')
    done = machine.run("tpu_pod.sh", "create")
    assert done.returncode == 1 and "no permission" in done.stderr


def test_a_dry_run_prints_the_commands_and_calls_nothing(machine):
    done = machine.run("tpu_pod.sh", "--dry_run", "resume", *GIN)
    assert done.returncode == 0, done.stderr
    assert machine.calls() == []
    delete, create, _, copy, install, run = commands(done.stdout)
    assert (delete, create) == (DELETE, [*QUEUED, "create", "pod", *PLACE, *TYPE, "--node-id=pod"])
    assert copy[4] == "scp" and install[4] == "ssh" and "learner.sh" in run[-1]
    assert shlex.join(LIST[:4]) in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["create"], {"PROJECT": ""}, "set PROJECT: the Google Cloud project"),
        (["create"], {"TPU_TYPE": ""}, "set TPU_TYPE: the accelerator type, such as v6e-64"),
        (["create"], {"TPU_NAME": "a; rm -rf"}, r"TPU_NAME may hold letters"),
        (["create"], {"TPU_SLICES": "many"}, "TPU_SLICES must be an integer >= 1 (got many)"),
        (["setup"], {"JAXRL_LLM_TOKEN": "short"}, "random token of at least 16"),
        (["run"], {}, "run needs launch's arguments"),
        (["explode"], {}, "create   asks for the pod"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_done(machine, arguments, variables, message):
    done = machine.run("tpu_pod.sh", *arguments, **variables)
    assert done.returncode == 2 and message in done.stderr
    assert changes(machine) == []
