"""Targets have names, need their compilers, and what a compiled program exchanges is read from its text."""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm import launch
from jaxrl_llm.distributed import hlo, topology
from jaxrl_llm.tools import programs

# Two steps of one gathering between fusions, as TPU's compiler writes them, a scattered sum, and an exchange that is waited for.
STEPS = """HloModule m

%async_collective_fusion.1 (a: bf16[96,64]) -> (f32[8], bf16[1536,64]) {
  %a = bf16[96,64]{1,0} parameter(0)
  %g.1 = bf16[1536,64]{1,0:T(8,128)(2,1)} all-gather(%a), channel_id=7, replica_groups=[1,16]<=[16], dimensions={0}, frontend_attributes={chain_id="4"}
}

%fused_computation.2 (b: bf16[96,64]) -> bf16[1536,64] {
  %b = bf16[96,64]{1,0} parameter(0)
  %g.2 = bf16[1536,64]{1,0} all-gather(%b), channel_id=7, replica_groups=[1,16]<=[16], dimensions={0}, frontend_attributes={chain_id="4"}
  ROOT %done = bf16[1536,64]{1,0} custom-call(%g.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.3 (c: f32[8,128]) -> f32[2,128] {
  %c = f32[8,128]{1,0} parameter(0)
  %r = f32[8,128]{1,0} all-reduce(%c), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %s = f32[2,128]{1,0} dynamic-slice(%r), dynamic_slice_sizes={2,128}
}

%condition (p: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(28)
}

%body (p: (s32[])) -> (s32[]) {
  %kernel = (f32[8]{0:T(8)}, /*index=1*/f32[8]{0}) custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="one
"and the rest"}, backend_config={"bundle_analysis_data":{"estimated_cycles":"50"}}
  %first = (f32[8], bf16[1536,64]) fusion(%x), kind=kOutput, calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"1000"}
  %last = bf16[1536,64]{1,0} fusion(%first), kind=kCustom, calls=%fused_computation.2
  %sum = f32[2,128]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.3
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %loop = (s32[]) while(%t), condition=%condition, body=%body
  %turn = f32[16,8]{1,0} all-to-all(%z), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
}
"""


def test_steps_of_one_exchange_count_once_and_loops_as_often_as_they_run():
    program = hlo.Program(STEPS)
    found = [(c.kind, c.asynchronous, c.times, c.looped, c.bytes, c.devices) for c in program.collectives]
    assert found == [
        ("all-gather", True, 28, True, 1536 * 64 * 2, 16),
        ("reduce-scatter", False, 28, True, 8 * 128 * 4, 4),
        ("all-to-all", False, 1, False, 16 * 8 * 4, 4),
    ]
    assert program.cycles == 28 * (1000 + 50)
    assert [round(c.sent) for c in program.collectives] == [28 * 1536 * 64 * 2 * 15 // 16, 28 * 4096 * 3 // 4, 384]


def test_a_program_of_this_process_has_the_exchanges_that_were_written():
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))

    def step(total, x):
        whole = jax.lax.all_gather(x, "fsdp", tiled=True)
        return total + jax.lax.psum_scatter(jnp.outer(whole, whole), "fsdp", tiled=True), None

    def run(rows):
        return jax.lax.scan(step, jnp.zeros((2, 8)), rows)[0]

    program = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=PartitionSpec(None, "fsdp"), out_specs=PartitionSpec("fsdp"), check_vma=False
        )
    )
    text = program.lower(jax.ShapeDtypeStruct((5, 8), jnp.float32)).compile().as_text()
    found = {c.kind: (c.times, c.looped, c.bytes, c.devices) for c in hlo.Program(text).collectives}
    assert found == {"all-gather": (5, True, 8 * 4, 4), "reduce-scatter": (5, True, 8 * 8 * 4, 4)}


def test_products_that_travel_with_their_weights_and_sums_of_16_bits_are_found():
    passed = STEPS.replace(
        "  %sum = ",
        "  %p = (s32[], bf16[6,64]{1,0}, bf16[64,64]{1,0}) parameter(0)\n"
        "  %share = bf16[6,64]{1,0} get-tuple-element(%p), index=1\n"
        "  %total = bf16[64,64]{1,0} get-tuple-element(%p), index=2\n"
        "  %part = bf16[64,64]{1,0} convolution(%u, %share), dim_labels=bf_io->bf\n"
        "  %next = (bf16[6,64]{1,0}, bf16[6,64]{1,0}) collective-permute-start(%share), source_target_pairs={{0,1}}\n"
        "  %here = bf16[6,64]{1,0} collective-permute-done(%next)\n"
        "  %more = bf16[64,64]{1,0} add(%total, %part)\n"
        "  ROOT %left = (s32[], bf16[6,64]{1,0}, bf16[64,64]{1,0}) tuple(%count, %here, %more)\n  %sum = ",
    )
    assert hlo.Program(STEPS).narrow_sums == [] and hlo.Program(passed).narrow_sums == ["part"]
    # What a turn sends of its own, or does not leave to the next, makes no product a part of a sum.
    assert hlo.Program(passed.replace("permute-start(%share)", "permute-start(%u)")).narrow_sums == []
    stays = passed.replace("tuple(%count, %here,", "tuple(%count, %share,")
    assert hlo.Program(stays).narrow_sums == []
    # The sum travels, and the shares of the weights stay: what is sent is added to, before it is sent or after.
    travels = stays.replace("permute-start(%share)", "permute-start(%total)")
    after = travels.replace("add(%total, %part)", "add(%here, %part)")
    before = travels.replace("permute-start(%total)", "permute-start(%more)").replace("%here, %more)", "%share, %here)")
    before = before.replace("tuple(%count, %share, %more)", "tuple(%count, %share, %here)")
    assert [hlo.Program(text).narrow_sums for text in (after, before)] == [["part"], ["part"]]
    assert hlo.Program(passed.replace("bf16[64,64]", "f32[64,64]")).narrow_sums == []
    rounded = STEPS.replace("%r = f32[8,128]", "%r = bf16[8,128]")
    assert hlo.Program(rounded).narrow_sums == []  # a sum in float32, which is rounded as it is written
    assert hlo.Program(rounded.replace("%c = f32[8,128]", "%c = bf16[8,128]")).narrow_sums == ["r"]
    assert hlo.Program(STEPS).waited == 8 * 128 * 4


def test_what_runs_on_a_sparse_core_is_asynchronous():
    aside = STEPS.replace(
        "%sum = f32[2,128]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.3",
        "%sum = f32[2,128]{1,0} call-start(%y), to_apply=%all-reduce-scatter.3",
    )
    assert {c.kind: c.asynchronous for c in hlo.Program(aside).collectives if c.looped} == {
        "all-gather": True,
        "all-reduce": True,
    }


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.Program("nothing")


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [("v6e:16x16", "v6e", (16, 16)), ("v5p:4x4x4", "v5p", (4, 4, 4)), ("h200:8", "h200", (8,))],
)
def test_a_target_is_a_kind_and_a_shape(name, kind, sizes):
    assert topology.parsed(name) == (kind, sizes)
    assert topology.slices(name) == 1


# The shapes are those of Google Cloud's tables of v6e and v5p.
@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("v6e-1", "v6e:1x1"),
        ("v6e-4", "v6e:2x2"),
        ("v6e-8", "v6e:2x4"),
        ("v6e-32", "v6e:4x8"),
        ("v6e-256", "v6e:16x16"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-16", "v5p:2x2x2"),
        ("v5p-32", "v5p:2x2x4"),
        ("v5p-64", "v5p:2x4x4"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-256", "v5p:4x4x8"),
    ],
)
def test_an_accelerator_type_has_a_shape(name, same):
    assert topology.parsed(name) == topology.parsed(same)


def test_slices_are_counted():
    assert topology.slices("2*v6e:4x4") == topology.slices("2*v6e-16") == 2
    assert topology.parsed("2*v6e:4x4") == topology.parsed("2*v6e-16") == ("v6e", (4, 4))


@pytest.mark.parametrize(
    "name",
    [
        "v6e",
        "v6e:4",
        "v9:2x2",
        "v6e-6",
        "v5p-4",
        "v5p-9",
        "v9-4",
        "0*v6e:2x2",
        "2*h200:8",
        "h200:2x2",
        "h200:0",
        "v6e:0x4",
        "tpu:2x2",
        "",
    ],
)
def test_other_names_are_refused_with_those_that_there_are(name):
    with pytest.raises(ValueError, match=r"names no target: use .* v6e:16x16 .* h200:8; kinds are v5p, v6e, h200"):
        topology.parsed(name)


@pytest.mark.parametrize(("name", "extra"), [("v6e:2x2", "aot-tpu"), ("h200:2", "aot-gpu")])
def test_a_compiler_that_is_not_installed_is_named(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(topology.Missing, match=rf"not installed: pip install 'jaxrl-llm\[{extra}\]'"):
        topology.prepare(name, {})
    with pytest.raises(topology.Missing, match=extra):
        topology.devices(name)


def test_the_environment_is_the_targets_and_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    own = {"LIBTPU_INIT_ARGS": "--xla_enable_async_all_gather=false", "JAX_PLATFORMS": "tpu"}
    topology.prepare("v6e:4x4", own)
    assert own["JAX_PLATFORMS"] == "cpu" and own["TPU_SKIP_MDS_QUERY"] == own["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert "--xla_enable_async_all_gather=false" in own["LIBTPU_INIT_ARGS"].split()
    assert "--xla_tpu_overlap_compute_collective_tc=true" in own["LIBTPU_INIT_ARGS"].split() and "XLA_FLAGS" not in own
    gpu: dict[str, str] = {}
    topology.prepare("h200:8", gpu)
    assert (
        "--xla_gpu_enable_latency_hiding_scheduler=true" in gpu["XLA_FLAGS"].split() and "LIBTPU_INIT_ARGS" not in gpu
    )


def test_a_target_cannot_be_run_on(capsys, tmp_path):
    flags = [f"--gin={binding}" for binding in tiny_run.bindings(tmp_path / "run")]
    assert launch.main([f"--gin_file={tiny_run.GIN_FILE}", *flags, "--topology=v6e:2x2"]) == 1
    assert "add --dry_run, or leave it out to run" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("jaxrl_llm.launch", "--dry_run"), ("jaxrl_llm.tools.plan",)])
def test_a_run_is_compiled_for_a_target_that_is_not_there(command, tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the compiler of TPUs is not installed: libtpu")
    # The tests' own settings of JAX are for its CPU; their folder is on the path, for the reward.
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "LIBTPU_"))}
    own["PYTHONPATH"] = os.pathsep.join([str(tiny_run.ROOT / "tests"), own.get("PYTHONPATH", "")])
    asked = tiny_run.arguments(tmp_path / "run", **tiny_run.RL_ALONE)
    done = subprocess.run(
        [sys.executable, "-m", *command, "--topology=v6e:2x2", *asked],
        cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=500, env=own,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "programs of rl for v6e:2x2" in done.stdout and "M cycles" in done.stdout
    assert "reduce-scatter" in done.stdout and "peak of rl" in done.stdout
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_a_chip_is_refused_with_what_to_change():
    target = programs.Target(name="v6e:2x2", kind="v6e", devices=[])
    programs.check_fit(31e9, "update", target)
    with pytest.raises(
        MemoryError, match=r"the update needs 32.60 GiB a device and v6e:2x2 has 29.80: lower ROWS.*remat = 'full'"
    ):
        programs.check_fit(35e9, "update", target)
