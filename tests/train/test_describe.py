"""A run says on which paths it goes before it starts, and one that would be much too slow is refused with the way out."""

import json
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import pytest
import tiny_run

from jaxrl_llm import launch
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.delta_rule import api as delta_rule
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.metrics import flops
from jaxrl_llm.models.lora import LoRA
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.sources import PolicySource
from jaxrl_llm.rewards.code_tests import CodeTests
from jaxrl_llm.rewards.maths import Maths
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.services import pool
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.rewards.wrap import Wrap
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools import doctor
from jaxrl_llm.train import build, describe
from jaxrl_llm.train.stage import Stage

ON_CPU = "attention reference, token_stats xla, decode_attention reference on cpu"


@dataclass(frozen=True)
class Gpu:
    device_kind: str
    compute_capability: str
    platform: str = "gpu"
    core_count: int = 132


H200, A100 = Gpu("NVIDIA H200", "9.0"), Gpu("NVIDIA A100-SXM4-80GB", "8.0")
# The sizes of Qwen2.5-1.5B.
SIZES = Qwen2(
    vocabulary_size=151936, width=1536, layers=28, heads=12, kv_heads=2, head_width=128, mlp_width=8960, tied=True
)


@pytest.fixture
def cudnn(monkeypatch):
    """Lets the calls of cuDNN be traced where it is not installed."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91000)
    own = lambda least: dispatch.capability() >= tuple(map(int, least.split(".")))  # noqa: E731
    monkeypatch.setattr(private, "check_compute_capability", own)


def run_of(*, dtype="bfloat16", row_tokens=16384, slow=False, reward=None, sampler=None, **changes):
    """(a run of one GRPO stage whose responses fill the rows, its policy)."""
    source = PolicySource(architecture=SIZES, compute_dtype=dtype, slow_kernels=slow, **changes)
    stage = Stage(
        name="s", data=Sorting(size=8), optimizer=Optimizer(moments_dtype="bfloat16"), steps=1, algorithm=GRPO(),
        packing=Packing(row_tokens=row_tokens, rows=2, sequences_per_row=4), reward=reward or Wrap(function=len),
        prompts_per_step=4, group_size=4, max_prompt_tokens=512, settings=SamplingParams(max_tokens=row_tokens - 512),
    )  # fmt: skip
    run = SimpleNamespace(
        stages=[stage],
        sampler=sampler or EmbeddedSampler(slots=16),
        policy=source,
        max_length=row_tokens,
        mesh=MeshConfig(),
    )
    return run, source.policy(Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))


def kernels(*run):
    return describe.describe(*run)[0].removeprefix("kernels").strip()


def test_a_hopper_gpu_names_its_own_kernels(cudnn):
    with dispatch.target(H200):
        found = kernels(*run_of())
    assert found == "attention cudnn, token_stats mosaic_gpu, decode_attention triton on NVIDIA H200"


def test_an_ampere_gpu_takes_segments_one_at_a_time_and_blocks_of_the_vocabulary(cudnn):
    with dispatch.target(A100):
        found = kernels(*run_of())
    assert found == "attention cudnn_segments, token_stats xla, decode_attention triton on NVIDIA A100-SXM4-80GB"


# An A100 does fewer FLOPs in the time of a byte, so that scores in memory cost it less.
@pytest.mark.parametrize(("device", "row_tokens"), [(H200, 16384), (A100, 65536)], ids=["H200", "A100"])
def test_long_rows_in_float32_on_a_gpu_are_refused_with_the_setting_that_allows_them(device, row_tokens):
    run, policy = run_of(dtype="float32", row_tokens=row_tokens)
    with dispatch.target(device):
        with pytest.raises(
            ValueError, match=r"attention would run as 'blocked'.*not float32: set Policy's compute_dtype"
        ) as e:
            describe.describe(run, policy)
        assert str(e.value).endswith("sources.PolicySource.slow_kernels = True")
        allowed = replace(run.policy, slow_kernels=True)
        found = kernels(SimpleNamespace(**{**vars(run), "policy": allowed}), policy)
    assert found.startswith("attention blocked (not cudnn") and "and reference (not cudnn" in found  # prefill is short


def test_short_rows_in_float32_on_a_gpu_cost_little_and_go_on():
    with dispatch.target(H200):
        found = kernels(*run_of(dtype="float32", row_tokens=1024))
    assert "(not cudnn: it takes bfloat16 and float16, not float32" in found


def test_the_estimate_of_a_slowdown_is_the_stated_one():
    """The FLOPs of a token by hand: 28 layers and the head, and attention over half of 1,024 tokens."""
    run, policy = run_of(dtype="float32", row_tokens=1024)
    call = SimpleNamespace(max_segments=4, queries=1024, width=128)
    layers = 28 * (1536 * (2 * 1536 + 2 * 256 + 3 * 8960))
    rest = 6 * layers / 989e12 / 0.70 + 8 * 151936 * 1536 / 989e12 / 0.62  # seconds of a token on an H200
    part = 28 * 4 * 1536 * 512 / 989e12 * (1 / 0.50 + 2.5 / 0.385)  # every layer sees half of 1,024 tokens in the mean
    passes = 14 * 4 * 28 * 12 / 4.8e12 / 0.83  # of float32 scores, twelve heads, for each pair of tokens
    with dispatch.target(H200):
        for backend, pairs in (("blocked", 512), ("reference", 1024)):
            choice = dispatch.Choice(op="attention", backend=backend, call=call, refused={})
            assert describe.slowdown(choice, run, policy) == pytest.approx(
                (rest + passes * pairs) / (rest + part), rel=1e-12
            )


def test_plain_attention_is_as_much_slower_as_was_measured_on_an_h200():
    """Forward at 4,096 tokens and heads of 128: cuDNN made 412 TFLOP/s, plain JAX 49."""
    passes = describe.FORWARD * describe.SCORE_BYTES * 4096 / (flops.RATES["memory"] * flops.BANDWIDTHS["NVIDIA H200"])
    cudnn = 4 * 128 * 4096 / 2 / 412e12
    assert passes / cudnn == pytest.approx(412 / 49, rel=0.05)


def test_a_device_without_figures_is_taken_to_have_the_least_flops_for_a_byte():
    assert flops.intensity("NVIDIA H200") == pytest.approx(989 / 4.8)
    assert flops.intensity("NVIDIA GeForce RTX 4090") == flops.intensity("NVIDIA A100-SXM4-80GB")
    assert flops.intensity("NVIDIA A100-SXM4-80GB") == pytest.approx(312 / 2.039)


def test_the_dtypes_of_every_part_are_named():
    run, policy = run_of(row_tokens=1024, lora=LoRA(), sampler=EmbeddedSampler(slots=4, cache="float8_e4m3fn"))
    found = describe.describe(run, policy)[1]
    assert found == (
        "dtypes       weights and gradients float32, frozen base float32, compute bfloat16, moments bfloat16 and float32, "
        "cache float8_e4m3fn"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"weights": "stochastic"}, "weights bfloat16 (stochastic) and gradients bfloat16"),
        (
            {"weights": "compensated", "gradients_dtype": "float32"},
            "weights bfloat16 (compensated) and gradients float32",
        ),
        ({"gradients_dtype": "bfloat16"}, "weights float32 and gradients bfloat16"),
    ],
)
def test_weights_and_gradients_in_bfloat16_are_named(fields, said):
    run, policy = run_of(row_tokens=1024)
    run.stages = [replace(run.stages[0], optimizer=Optimizer(**fields))]
    assert describe.describe(run, policy)[1].startswith(f"dtypes       {said}, compute bfloat16, ")


def test_rewards_that_evaluate_what_the_model_wrote_say_how_it_is_shut_in(monkeypatch):
    tests = CodeTests(service=Service(urls=["http://127.0.0.1:1"]))
    run, policy = run_of(row_tokens=1024, reward=Weighted(parts={"a": Maths(), "b": tests}))
    pool.shut_in_here.cache_clear()
    line = describe.describe(run, policy)[3]
    assert "maths.Maths, processes of their own" in line and line.count("shut in by seccomp") == 1
    assert "code_tests.CodeTests, http://127.0.0.1:1: isolation unknown" in line
    pool.shut_in_here.cache_clear()
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert "NOT shut in: " in describe.describe(run, policy)[3]
    pool.shut_in_here.cache_clear()


HALF = Qwen2(
    vocabulary_size=151936, width=896, layers=24, heads=14, kv_heads=2, head_width=64, mlp_width=4864, tied=True
)


def test_parameters_that_fsdp_does_not_divide_are_filled_up_and_the_zeros_counted():
    """The sizes of Qwen2.5-0.5B over six devices: 6 divides none of 896, 4864, 151936, 14, 2 and 64, and 900 is its next multiple."""
    run, _ = run_of(row_tokens=1024)
    source = PolicySource(architecture=HALF)
    six, seven = (source.policy(Partitioner.create(MeshConfig(fsdp=n), jax.devices()[:n])) for n in (6, 7))
    # Norms and biases have no dimension for fsdp: 24 layers of 2 norms and 18 heads' biases, and the last norm.
    small = 24 * (2 * 896 + (14 + 2 + 2) * 64) + 896
    total = small + 24 * (896 * 64 * (14 + 2 + 2 + 14) + 3 * 896 * 4864) + 151936 * 896
    line = describe.describe(run, seven)[4]
    assert line == (
        f"sharding     fsdp 7 divides all parameters but {small / total:.2%}; "
        f"a device holds {(total - small + 7 * small) / total:.2f} times its share"
    )
    zeros = (total - small) * 4 // 896  # each matrix has one dimension of 896
    line = describe.describe(run, six)[4]
    assert line == (
        f"sharding     fsdp 6 divides all parameters but {small / (total + zeros):.2%}, filled up with {zeros / total:.2%} of zeros; "
        f"a device holds {(total + zeros + 5 * small) / (total + zeros):.2f} times its share"
    )


def test_a_kernel_is_found_again_where_its_program_is_traced_already():
    run = run_of(row_tokens=1024)
    assert kernels(*run) == kernels(*run)


@pytest.mark.slow
def test_dry_run_doctor_and_the_run_itself_say_the_same(tmp_path, capsys):
    done = tiny_run.launch(tmp_path / "run", SFT_STEPS=1, STEPS=1, SAVE_EVERY=1, EVALUATE_EVERY=1)
    assert done.returncode == 0, done.stderr
    lines = [
        line
        for line in done.stdout.splitlines()
        if line.split(" ")[0] in ("kernels", "dtypes", "sampling", "verifiers")
    ]
    assert [line.split()[0] for line in lines] == ["kernels", "dtypes", "sampling", "verifiers"]
    assert ON_CPU in lines[0] and "cache float32" in lines[1] and "embedded.EmbeddedSampler" in lines[2]
    log = [json.loads(line)["message"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [" ".join(line.split()) for line in lines] == [
        m for m in log if m.split(" ")[0] in ("kernels", "dtypes", "sampling", "verifiers")
    ]
    flags = [
        f"--gin_file={tiny_run.GIN_FILE}",
        *(f"--gin={b}" for b in tiny_run.bindings(tmp_path / "run", **{"train.Run.mesh": "@train.MeshConfig()"})),
    ]
    assert launch.main([*flags, "--dry_run"]) == 0
    assert set(lines) <= set(capsys.readouterr().out.splitlines())
    assert doctor.main([*flags, f"--run_dir={tmp_path}"]) == 0
    shown = [" ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()]
    assert {" ".join(line.split()) for line in lines} <= set(shown)


def test_a_kernel_whose_calls_have_no_dtype_runs_by_the_best_backend_that_the_device_has():
    sizes = {"tokens": 64, "size": 64, "key_heads": 2, "value_heads": 2, "key_width": 16, "value_width": 16}
    call = delta_rule.Call(platform="cpu", rows=1, **sizes)
    assert describe.better(dispatch.Choice(op="delta_rule", backend="xla", call=call, refused={"triton": "no"})) is None


def test_dropped_rows_are_told_with_the_limit_that_they_pass(capsys):
    build.say("stage rl: 3 rows", {"rows": 6, "kept": 4, "truncated": 0, "dropped/too_long": 2, "dropped/empty": 0})
    build.say("stage rl: 3 rows", {"rows": 3, "kept": 3, "truncated": 0, "dropped/too_long": 0})
    told = "stage rl: 3 rows (dropped/too_long 2 of 6, longer than PROMPT_LIMIT)\nstage rl: 3 rows\n"
    assert capsys.readouterr().out == told
