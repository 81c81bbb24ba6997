"""launch/slurm.sh and launch/slurm.sbatch: what Slurm is asked for, and the steps of an allocation."""

import pytest
from stand_ins import LAUNCH, ROOT, Machine, commands

GIN = ["--gin_file=gin/grpo_gsm8k.gin", "--gin=RUN_DIR='runs/my run'"]
TOKEN = "0123456789abcdef"
INSIDE = {
    "ROOT": str(ROOT),
    "SLURM_JOB_ID": "20007",
    "SLURM_JOB_NODELIST": "l[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "l[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "s[1-2]",
    "LEARNER_NODES": "2",
    "SAMPLER_NODES": "2",
    "SAMPLER_GPUS": "4",
    "RUN_ROOT": "/nfs/runs",
    "PUBLICATION": "/nfs/publication",
    "JAXRL_LLM_TOKEN": TOKEN,
    "POLL_S": "0.05",
}


@pytest.fixture
def machine(tmp_path) -> Machine:
    made = Machine(home=tmp_path)
    made.tool("sbatch", 'env | grep -E "^(LEARNER_NODES|SAMPLER_NODES|MODEL|PUBLICATION)=" | sort >"$HOME/handed"')
    made.tool("scontrol", 'if [ "$2" = hostnames ]; then printf "%s\\n" "${3%%[*}1" "${3%%[*}2"; fi')
    made.tool("curl", "grep -q 'Bearer 0123456789abcdef'")
    made.tool(
        "srun",
        'case "$*" in *learner.sh*) env | grep ^JAX_ | sort >"$HOME/jax"; exit "${ENDS:-0}" ;; *) exec sleep 30 ;; esac',
    )
    return made


def test_learners_and_samplers_are_two_parts_of_one_job(machine):
    run_root = str(machine.home / "runs")
    done = machine.run(
        "slurm.sh", *GIN, LEARNER_NODES="2", SAMPLER_NODES="3", SAMPLER_GPUS="4", MODEL="/nfs/model", RUN_ROOT=run_root,
        PARTITION="h200", SAMPLER_PARTITION="a100", ACCOUNT="lab", TIME="2-0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (call,) = machine.calls()
    job = ["--job-name=jaxrl_llm", "--time=2-0", "--requeue", "--open-mode=append", f"--output={run_root}/%x-%j.log"]
    learner = ["--nodes=2", "--ntasks-per-node=1", "--exclusive", "--partition=h200", "--gpus-per-node=8"]
    samplers = ["--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=4", "--exclusive", "--partition=a100"]
    script = [str(LAUNCH / "slurm.sbatch"), *GIN]
    assert call == ["sbatch", *job, "--signal=TERM@300", "--account=lab", *learner, ":", *samplers, *script]
    handed = (machine.home / "handed").read_text().split()
    assert handed == ["LEARNER_NODES=2", "MODEL=/nfs/model", f"PUBLICATION={run_root}/publication", "SAMPLER_NODES=3"]
    assert (machine.home / "runs" / "publication").is_dir()


def test_a_run_with_the_embedded_sampler_is_a_plain_job(machine):
    done = machine.run("slurm.sh", "--dry_run", *GIN, RUN_ROOT="/nfs/runs", LEARNER_GPUS="0")
    assert done.returncode == 0, done.stderr
    assert machine.calls() == []
    folder, submit = commands(done.stdout)
    assert folder == ["mkdir", "-p", "/nfs/runs"]
    assert (
        ":" not in submit
        and not any("gpus" in word for word in submit)
        and submit[-3:] == [str(LAUNCH / "slurm.sbatch"), *GIN]
    )


def test_an_allocation_starts_samplers_waits_for_them_and_starts_the_learner(machine):
    done = machine.run("slurm.sbatch", *GIN, **INSIDE)
    assert done.returncode == 0, done.stderr
    calls = machine.calls("srun", "curl")
    serve, *asked, learn = sorted(
        calls, key=lambda call: (call[0] == "curl") + 2 * (str(LAUNCH / "learner.sh") in call)
    )
    assert serve[1:3] == ["--het-group=1", "--kill-on-bad-exit=0"]
    assert serve[-3:-1] == ["bash", "-c"]
    assert serve[-1] == f"LISTEN=$SLURMD_NODENAME exec env TENSOR_PARALLEL=4 PORT=9000 {LAUNCH / 'sampler.sh'}"
    assert [call[-1] for call in asked] == ["http://s1:9000/health", "http://s2:9000/health"]
    assert not any(TOKEN in word for call in calls for word in call), "lists of processes show words"
    assert learn == [
        "srun", "--het-group=0", "--ntasks-per-node=1", "--kill-on-bad-exit=1", str(LAUNCH / "learner.sh"),
        "--gin=VLLM_SPAWN=False", "--gin=VLLM_URLS=('http://s1:9000','http://s2:9000',)", "--gin=PUBLICATION='/nfs/publication'",
        "--gin=vllm.VllmSampler.proxied=True",
        "--gin=vllm.VllmSampler.api_key_variable='JAXRL_LLM_TOKEN'", *GIN, "--gin_file=gin/samplers/vllm.gin",
    ]  # fmt: skip
    assert (machine.home / "jax").read_text().split() == ["JAX_COORDINATOR_ADDRESS=l1:20007", "JAX_NUM_PROCESSES=2"]


@pytest.mark.parametrize(("code", "again"), [("0", False), ("1", False), ("75", True), ("76", True), ("143", True)])
def test_a_run_that_can_go_on_is_queued_again_and_an_error_is_not(machine, code, again):
    done = machine.run("slurm.sbatch", *GIN, **(INSIDE | {"SAMPLER_NODES": "0", "ENDS": code}))
    assert done.returncode == int(code), done.stderr
    requeued = ["scontrol", "requeue", "20007"] in machine.calls()
    assert requeued == again


def test_a_tool_or_a_model_that_is_missing_is_named(machine):
    done = machine.run("slurm.sh", *GIN, SAMPLER_NODES="1")
    assert done.returncode == 2 and "set MODEL: the folder or Hugging Face id" in done.stderr
    (machine.home / "bin" / "sbatch").unlink()
    done = machine.run("slurm.sh", *GIN)
    assert done.returncode == 2 and "sbatch is not on PATH" in done.stderr
    assert machine.calls() == []
