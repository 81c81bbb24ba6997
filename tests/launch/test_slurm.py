"""launch/slurm.sh and launch/slurm.sbatch: what Slurm is asked for, and the steps of an allocation."""

import json
import re
import runpy

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
    "SERVERS": "2",
    "TENSOR_PARALLEL": "2",
    "RUN_ROOT": "/nfs/runs",
    "PUBLICATION": "/nfs/publication",
    "JAXRL_LLM_TOKEN": TOKEN,
    "POLL_S": "0.05",
}


@pytest.fixture
def machine(tmp_path) -> Machine:
    made = Machine(home=tmp_path)
    made.tool(
        "sbatch",
        'env | grep -E "^(LEARNER_NODES|SAMPLER_NODES|MODEL|PUBLICATION|SERVERS|TENSOR_PARALLEL|RELAY_PORT)=" | sort >"$HOME/handed"',
    )
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
    samplers = ["--nodes=3", "--ntasks-per-node=4", "--gpus-per-node=4", "--exclusive", "--partition=a100"]
    script = [str(LAUNCH / "slurm.sbatch"), *GIN]
    assert call == ["sbatch", *job, "--signal=TERM@300", "--account=lab", *learner, ":", *samplers, *script]
    handed = (machine.home / "handed").read_text().split()
    assert handed == [
        "LEARNER_NODES=2",
        "MODEL=/nfs/model",
        f"PUBLICATION={run_root}/publication",
        "SAMPLER_NODES=3",
        "SERVERS=4",
        "TENSOR_PARALLEL=1",
    ]
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
    assert serve[1:4] == ["--het-group=1", "--ntasks-per-node=2", "--kill-on-bad-exit=0"]
    assert serve[-3:-1] == ["bash", "-c"]
    server = f"exec env TENSOR_PARALLEL=2 PORT=9000 {LAUNCH / 'sampler.sh'}"
    assert serve[-1] == f"LISTEN=$SLURMD_NODENAME NUMBER=$SLURM_LOCALID {server}"
    urls = ["http://s1:9000", "http://s1:9001", "http://s2:9000", "http://s2:9001"]
    assert [call[-1] for call in asked] == [f"{url}/health" for url in urls]
    assert not any(TOKEN in word for call in calls for word in call), "lists of processes show words"
    assert learn == [
        "srun", "--het-group=0", "--ntasks-per-node=1", "--kill-on-bad-exit=1", str(LAUNCH / "learner.sh"),
        "--gin=VLLM_SPAWN=False", "--gin=VLLM_URLS=('http://s1:9000','http://s1:9001','http://s2:9000','http://s2:9001',)", "--gin=PUBLICATION='/nfs/publication'",
        "--gin=vllm.VllmSampler.proxied=True",
        "--gin=vllm.VllmSampler.api_key_variable='JAXRL_LLM_TOKEN'", *GIN, "--gin_file=gin/samplers/vllm.gin",
    ]  # fmt: skip
    assert (machine.home / "jax").read_text().split() == ["JAX_COORDINATOR_ADDRESS=l1:20007", "JAX_NUM_PROCESSES=2"]


def test_a_relay_on_each_sampler_node_is_started_and_told_to_the_learner(machine):
    run_root = str(machine.home / "runs")
    done = machine.run("slurm.sh", *GIN, SAMPLER_NODES="1", MODEL="/nfs/model", RUN_ROOT=run_root, RELAY_PORT="9100")
    assert done.returncode == 0, done.stderr
    assert "RELAY_PORT=9100" in (machine.home / "handed").read_text().split(), "sbatch hands its environment on"
    done = machine.run("slurm.sbatch", *GIN, **INSIDE, RELAY_PORT="9100", RELAY_FOLDER="/tmp/relay")
    assert done.returncode == 0, done.stderr
    serve, *_, learn = sorted(machine.calls("srun"), key=lambda call: str(LAUNCH / "learner.sh") in call)
    server = f"exec env TENSOR_PARALLEL=2 PORT=9000 RELAY_PORT=9100 RELAY_FOLDER=/tmp/relay {LAUNCH / 'sampler.sh'}"
    assert serve[-1] == f"LISTEN=$SLURMD_NODENAME NUMBER=$SLURM_LOCALID {server}"
    assert "--gin=VLLM_RELAY_PORT=9100" in learn
    refused = machine.run("slurm.sh", *GIN, SAMPLER_NODES="1", MODEL="/nfs/model", RUN_ROOT=run_root, RELAY_PORT="0")
    assert refused.returncode == 2 and "RELAY_PORT must be an integer >= 1 (got 0)" in refused.stderr


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


def test_a_tensor_size_that_the_model_or_the_hosts_do_not_take_is_refused_before_anything_is_asked_for(
    machine, tmp_path
):
    """Qwen2.5-0.5B: 14 heads, 2 KV heads; 14 = 2 * 7, and 7 does not divide its MLP of 4,864 = 2**8 * 19."""
    machine.python("python3")
    sizes = {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    asked = {"SAMPLER_NODES": "1", "MODEL": str(tmp_path), "RUN_ROOT": str(tmp_path / "runs")}
    done = machine.run("slurm.sh", *GIN, **asked, TENSOR_PARALLEL="8")
    assert done.returncode == 2 and "14 heads and 2 KV heads" in done.stderr and "it may be 1, 2\n" in done.stderr
    done = machine.run("slurm.sh", *GIN, **asked, TENSOR_PARALLEL="3")
    assert done.returncode == 2 and "TENSOR_PARALLEL=3 leaves 2 of SAMPLER_GPUS=8 idle" in done.stderr
    assert machine.calls() == [] and not (tmp_path / "runs").exists()
    done = machine.run("slurm.sh", *GIN, **asked, TENSOR_PARALLEL="2")
    assert done.returncode == 0, done.stderr
    assert "--ntasks-per-node=4" in machine.calls("sbatch")[0]


LLAMA_70B = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
    "vocab_size": 128256,
}  # fmt: skip
QWEN_0P5B = {
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
    "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "given", "size", "message"),
    [  # 141 GB: a quarter is less than half of 80 GB, half of it is not; 1 GB fits one GPU
        (LLAMA_70B, {}, "4", ""), (LLAMA_70B, {"GPU_GB": "192"}, "2", ""), (QWEN_0P5B, {}, "1", ""),
        (LLAMA_70B, {"GPU_GB": "24"}, "", "141 GB of weights.*split over 1, 2, 4, 8 of the 8 GPUs"),
        (LLAMA_70B, {"SAMPLER_GPUS": "6"}, "", "split over 1, 2 of the 6 GPUs"), (None, {}, "1", "no config.json of the model here"),
    ],
)  # fmt: skip
def test_the_tensor_size_is_the_fewest_gpus_that_hold_the_model(machine, tmp_path, config, given, size, message):
    machine.python("python3")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {
        "SAMPLER_NODES": "1",
        "MODEL": "/nfs/model",
        "MODEL_CONFIG": str(tmp_path),
        "RUN_ROOT": str(tmp_path / "runs"),
    }
    done = machine.run("slurm.sh", *GIN, **asked, **given)
    assert re.search(message, done.stderr), done.stderr
    assert done.returncode == (0 if size else 2)
    if size:
        assert f"TENSOR_PARALLEL={size}" in (machine.home / "handed").read_text().split()
        assert f"--ntasks-per-node={8 // int(size)}" in machine.calls("sbatch")[0]
    else:
        assert machine.calls() == []


@pytest.mark.parametrize(
    ("config", "billions"),
    [  # as their makers count them
        (LLAMA_70B, 70.6), (QWEN_0P5B, 0.494),
        ({"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
          "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936}, 30.5),
    ],
)  # fmt: skip
def test_weights_are_counted_as_their_makers_do(config, billions):
    module = runpy.run_path(str(LAUNCH / "tensor_sizes.py"))
    assert module["weights"](config) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("config", "allowed"),
    [  # heads, KV heads, MLP and tokens: Qwen2.5-7B, Qwen2.5-1.5B, Llama-3.1-8B, and one of 191 tokens, padded to 192, without KV heads
        ((28, 4, 18944, 152064), [1, 2, 4]),
        ((12, 2, 8960, 151936), [1, 2, 4]),
        ((32, 8, 14336, 128256), [1, 2, 4, 8, 16, 32]),
        ((6, None, 6 * 64, 64 * 3 - 1), [1, 2, 3, 6]),
    ],
)
def test_sizes_divide_heads_mlp_and_padded_vocabulary_and_share_or_copy_kv_heads(config, allowed):
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    module = runpy.run_path(str(LAUNCH / "tensor_sizes.py"))
    assert module["sizes"](dict(zip(names, config, strict=True))) == allowed
