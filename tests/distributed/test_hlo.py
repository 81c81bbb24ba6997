"""What TPU's and the GPU's own compilers make of a small update: exact sums, no waiting in the loop over layers, and known cycles.

Needs the extras aot-tpu and aot-gpu; without a compiler its target is skipped. `.ci/topologies` runs what compiles for each target; that
each fault would be found is shown on small programs.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import compiled_update
import pytest

from jaxrl_llm.distributed import hlo, topology

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/fixtures/compiled_updates.json").read_text())
TARGETS = ("v6e:2x2", "v5p:2x2x1", "h200:2")
# The update for v6e takes as long to compile as those for the two others.
WORKERS = {"v6e:2x2": "one", "v5p:2x2x1": "other", "h200:2": "other"}
# A gradient of a layer's MLP has 896 x 2816 float32 numbers, 10 MiB, and half as many bytes of weights are gathered.
WAITED = 2**20
MORE = 1.1
# XLA's default of a flag that the project sets.
ON_TENSOR_CORES = "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=false"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles the small update for a target: ({kernels, programs}, its text)."""
    folder = tmp_path_factory.mktemp("compiled")

    @functools.cache
    def run(target, *flags, arguments=""):
        kind = topology.parsed(target)[0]
        needed = ("libtpu",) if kind in topology.TPUS else ("jax_cuda12_plugin", "nvidia.cudnn")
        missing = [name for name in needed if importlib.util.find_spec(name.partition(".")[0]) is None]
        if missing:
            pytest.skip(f"the compiler of {kind} is not installed: {', '.join(missing)}")
        text = folder / f"{len(list(folder.iterdir()))}.hlo"
        # The tests' own settings of JAX are for its CPU.
        own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))} | {
            "LIBTPU_INIT_ARGS": arguments
        }
        done = subprocess.run(
            [sys.executable, "tests/compiled_update.py", target, str(text), *flags],
            cwd=ROOT, capture_output=True, text=True, timeout=500, env=own,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1]), hlo.Program(text.read_text())

    return run


def squares(program, tokens):
    """Instructions whose result grows with the square of the tokens of a row."""
    return [name for name, _, sizes in program.arrays() if sizes.count(tokens) > 1]


def waited_outside(program):
    """Bytes of the largest exchange outside of loops that is waited for."""
    return max((one.bytes for one in program.collectives if not (one.looped or one.asynchronous)), default=0)


def faults(said, program, recorded):
    """What a small update must not show, as lines; `said` is what compiled_update.py prints, `recorded` an entry of RECORDED."""
    facts, found = said["programs"]["whole"], []
    if kernels := [kernel for kernel in said["kernels"] if kernel.endswith(" reference")]:
        found.append(f"no kernel of the target: {kernels}")
    if program.waited > WAITED:
        found.append(f"an exchange of {program.waited} bytes in the loop over layers is waited for")
    # TPUs' alone, whose compiler estimates cycles: on GPUs exchanges run on streams of their own.
    if "cycles" in recorded and (outside := waited_outside(program)) > WAITED:
        found.append(f"an exchange of {outside} bytes outside of loops is waited for")
    if program.narrow_sums:
        found.append(f"sums over devices in 16 bits: {program.narrow_sums}")
    if buffers := squares(program, compiled_update.ROW_TOKENS):
        found.append(f"buffers of tokens by tokens: {buffers}")
    for name in ("cycles", "peak_bytes"):
        if facts.get(name, 0) > MORE * recorded.get(name, 0):
            found.append(
                f"{name} {facts[name]}, where {recorded[name]} were recorded: where that is meant, write the new number to "
                "tests/fixtures/compiled_updates.json"
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param(t, marks=pytest.mark.xdist_group(WORKERS[t])) for t in TARGETS])
def test_an_update_is_exact_and_waits_for_nothing_large(compiled, target):
    said, program = compiled(target)
    assert faults(said, program, RECORDED[target]) == []
    assert said["kernels"] and {one.kind for one in program.collectives} >= {"all-gather", "reduce-scatter"}


# The compiler refuses a kernel that asks for more shared memory than a multiprocessor has.
@pytest.mark.slow
@pytest.mark.xdist_group("other")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exact_update_of_a_hybrid_has_kernels_that_fit_into_shared_memory(compiled, dtype):
    flags = ("--model=qwen3.5-0.8b", "--layers=4", f"--dtype={dtype}", "--rows=1", "--row_tokens=1024", "--segments=1")
    said, _ = compiled("h200:1", *flags)
    assert {"delta_inputs triton", "delta_rule triton"} <= set(said["kernels"])


@pytest.mark.slow
@pytest.mark.xdist_group(WORKERS["v6e:2x2"])
def test_the_heads_gradient_is_scattered_and_its_weights_are_not_turned(compiled):
    _, program = compiled("v6e:2x2")
    table = 4224 * 896 * 4
    sums = [c for c in program.collectives if c.bytes >= table and c.kind in ("all-reduce", "reduce-scatter")]
    assert sums and all(c.kind == "reduce-scatter" and c.asynchronous for c in sums)
    copies = [i for _, i, _, _ in program.executed if i.opcode == "copy" and sum(hlo.bytes_of(i.shape)) >= table // 2]
    assert copies == []


def printed(script, *arguments):
    """What a script of tests/ that has libtpu compile something prints as JSON."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the compiler of TPUs is not installed: libtpu")
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "LIBTPU_"))}
    command = [sys.executable, f"tests/{script}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=own)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# Heads that the tensor axis divides, and neither query nor key heads that it does, so that copies' gradients are added.
@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (7, 1)])
def test_parts_that_the_tensor_axis_makes_are_added_in_float32(heads, kv_heads):
    said = printed("compiled_heads.py", "v6e:2x2", heads, kv_heads)
    assert said["narrow_sums"] == []
    # There are such sums: of the MLP's output and its input's gradient, of 128 tokens in one row and a width of 256.
    assert "f32[1,128,256]" in said["added"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "chips"), [("v5p:4x4x4", 64), ("v6e:16x16", 256)])
def test_weights_that_a_pod_holds_are_gathered_beside_computation(target, chips):
    # Two weights of 4096 x 8192 bfloat16 numbers in each of three layers. By its defaults libtpu sums them with zeros on v5p:4x4x4, which
    # sends twice as much, and waits for one of them on v6e:16x16.
    assert printed("compiled_gathers.py", target) == [["all-gather", True, 3, 2 * 4096 * 8192, chips]] * 2


# Each check fails on the program that XLA makes by itself.


@pytest.mark.slow
def test_all_to_alls_of_the_table_are_waited_for_by_default(compiled):
    _, program = compiled("v6e:2x2", arguments="--xla_tpu_enable_async_all_to_all=false")
    assert waited_outside(program) > WAITED


@pytest.mark.slow
def test_sums_on_the_tensor_cores_are_waited_for(compiled):
    _, program = compiled("v6e:2x2", arguments=ON_TENSOR_CORES)
    assert program.waited > WAITED


@pytest.mark.slow
def test_attention_without_a_kernel_has_buffers_of_tokens_by_tokens(compiled):
    said, program = compiled("v6e:2x2", "--attention=reference")
    assert "attention reference" in said["kernels"] and squares(program, compiled_update.ROW_TOKENS)


# -- each fault on a program that has no other ------------------------------------------------------------------------

# A fusion, and the condition of a loop of four turns.
LOOP = """HloModule m

%fused (a: f32[4]) -> f32[4] {
  ROOT %a = f32[4]{0} parameter(0)
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(4)
  %p = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %turn = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%turn, %limit), direction=LT
}
"""

CLEAN = (
    LOOP
    + """
%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %part = f32[1024,1024]{1,0} parameter(0)
  %sum = f32[1024,1024]{1,0} all-reduce-start(%part), replica_groups={{0,1,2,3}}, to_apply=%add
  %work = f32[768,896]{1,0} fusion(%part), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %done = f32[1024,1024]{1,0} all-reduce-done(%sum)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %zero = s32[]{:T(128)} constant(0)
  %state = (s32[]{:T(128)}, f32[4]{0}) tuple(%zero, %x)
  %loop = (s32[]{:T(128)}, f32[4]{0}) while(%state), condition=%condition, body=%body
}
"""
)
KERNELS = ("attention splash", "token_stats mosaic_tpu")


@pytest.mark.parametrize(
    ("kernels", "changed", "fault"),
    [
        (KERNELS, {}, None),
        (KERNELS, {'"100"': '"110"'}, None),  # a tenth more is allowed
        (("attention reference", *KERNELS[1:]), {}, "no kernel of the target"),
        (KERNELS, {"all-reduce-start": "all-reduce"}, f"an exchange of {4 * 2**20} bytes"),
        (
            KERNELS,
            {"  %loop = ": "  %late = bf16[1024,1024]{1,0} all-to-all(%x), replica_groups={{0,1,2,3}}\n  %loop = "},
            f"an exchange of {2 * 2**20} bytes outside of loops is waited for",
        ),
        (KERNELS, {"f32[1024,1024]": "bf16[1024,1024]"}, "sums over devices in 16 bits: ['sum']"),
        (KERNELS, {"f32[768,896]": "bf16[12,768,768]"}, "buffers of tokens by tokens: ['work']"),
        (KERNELS, {'"100"': '"111"'}, "cycles 444, where 400 were recorded"),
    ],
)
def test_each_fault_fails_the_check_alone(kernels, changed, fault):
    text = CLEAN
    for before, after in changed.items():
        assert before in text
        text = text.replace(before, after)
    program = hlo.Program(text)
    said = {"kernels": list(kernels), "programs": {"whole": {"cycles": program.cycles, "peak_bytes": 10}}}
    found = faults(said, program, {"cycles": 400, "peak_bytes": 10})
    assert len(found) == (fault is not None) and all(one.startswith(fault) for one in found)


# -- reading a program -------------------------------------------------------------------------------------------------

SMALL = """HloModule m

%fused (a: f32[768,64]) -> f32[768,768] {
  %a = f32[768,64]{1,0} parameter(0)
  ROOT %inside = f32[768,768]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%branch (b: f32[4]) -> f32[4] {
  ROOT %waits = f32[4,1048576]{1,0} all-reduce(%b), replica_groups={{0,1}}, to_apply=%add, backend_config={"estimated_cycles":"7"}
}

ENTRY %main (x: f32[768,64]) -> f32[768] {
  %x = f32[768,64]{1,0} parameter(0)
  %scores = (f32[768,8]{1,0}, bf16[12,768,768]{2,1,0}) custom-call(%x), custom_call_target="Softmax"
  %whole = f32[768]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"30"}
  %either = f32[4] conditional(%p, %x, %x), branch_computations={%branch, %branch}
  %gathered = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), replica_groups={{0,1}}, dimensions={0}, backend_config={"is_sync":true}
}
"""


# A loop over four layers of which the first was taken out, as libtpu writes one whose exchanges end in the next turn, on two slices.
PEELED = (
    LOOP
    + """
%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %send.1 = (f32[28,8,128]{2,1,0}, u32[], token[]) send(%part, %t.1), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.1_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv.1 = (f32[28,8,128]{2,1,0}, u32[], token[]) recv(%t.1), channel_id=5, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.1_0"}
  %work = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %done.1 = (f32[28,8,128]{2,1,0}, token[]) recv-done(%recv.1), channel_id=5
  %send.2 = (bf16[7,8,128]{2,1,0}, u32[], token[]) send(%other, %t.2), channel_id=6, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.2_0",_xla_megascale_target="{0:3}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv.2 = (bf16[7,8,128]{2,1,0}, u32[], token[]) recv(%t.2), channel_id=7, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.2_0"}
  %done.2 = (bf16[7,8,128]{2,1,0}, token[]) recv-done(%recv.2), channel_id=7
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %one = s32[]{:T(128)} constant(1)
  %begin = s32[]{:T(128)} copy(%one)
  %state = (s32[]{:T(128)}, /*index=1*/f32[4]{0}) tuple(%begin, %x)
  %first = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %loop = (s32[]{:T(128)}, f32[4]{0}) while(%state), condition=%condition, body=%body
}
"""
)


def test_a_loop_whose_first_turn_was_taken_out_runs_once_less():
    assert hlo.Program(PEELED).cycles == 100 + 3 * 100
    assert hlo.Program(PEELED.replace("copy(%one)", "copy(%unknown)")).cycles == 100 + 4 * 100


def test_an_instruction_without_an_estimate_is_counted_and_left_out_of_the_cycles():
    program = hlo.Program(PEELED.replace('"100"', f'"{2**63 - 1}"', 1))
    assert program.cycles == 100 and program.unestimated == 3
    assert hlo.Program(PEELED).unestimated == 0


def test_exchanges_between_slices_are_read_and_those_with_nothing_before_their_answer_are_waited_for():
    program = hlo.Program(PEELED)
    found = [(c.kind, c.network, c.asynchronous, c.times, c.devices, c.bytes) for c in program.collectives]
    assert found == [
        ("all-reduce", True, True, 3, 2, 28 * 8 * 128 * 4),
        ("all-reduce", True, False, 3, 4, 7 * 8 * 128 * 2),
    ]
    assert program.waited == 7 * 8 * 128 * 2 and program.narrow_sums == ["send.2"]
    assert list(hlo.summed(program.collectives)) == [("all-reduce between slices", True), ("all-reduce between slices", False)]  # fmt: skip
    assert round(program.collectives[0].sent) == 3 * 2 * 28 * 8 * 128 * 4 // 2


def test_products_of_a_recorded_ring_round_their_sums_to_16_bits():
    # A loop over 16 shares of a weight, two a trip, as libtpu 0.0.42 made it of a query's projection on v6e:4x4 by its defaults.
    program = hlo.Program((ROOT / "tests/fixtures/windowed_einsum.hlo").read_text())
    assert program.narrow_sums == ["convolution.208", "convolution.209"]
    said = {"kernels": list(KERNELS), "programs": {"whole": {"peak_bytes": 10}}}
    assert faults(said, program, {"peak_bytes": 10}) == [f"sums over devices in 16 bits: {program.narrow_sums}"]
    assert {(c.kind, c.asynchronous, c.times, c.bytes) for c in program.collectives} == {("collective-permute", True, 8, 96 * 12 * 128 * 2)}  # fmt: skip


def test_buffers_inside_a_fusion_are_none_and_those_of_tuples_are():
    assert squares(hlo.Program(SMALL), 768) == ["scores"]


def test_every_branch_counts():
    program = hlo.Program(SMALL)
    assert program.cycles == 30 + 2 * 7 and program.waited == 0  # outside of loops
    assert [(c.name, c.asynchronous) for c in program.collectives] == [("waits", False), ("waits", False), ("gathered", False)]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("bf16[8,3]{1,0:T(8,128)(2,1)}", [48]),
        ("(f32[2]{0}, s32[], pred[5])", [8, 4, 5]),
        ("f8e4m3fn[7]", [7]),
        ("u4[10]", [10]),
        ("token[]", []),
    ],
)
def test_bytes_of_shapes(shape, sizes):
    assert hlo.bytes_of(shape) == sizes
