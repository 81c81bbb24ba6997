"""A run whose steps compile nothing new, score only when something is read, and leave a trace for TensorBoard."""

import json
from pathlib import Path

import pytest
import tiny_run

from jaxrl_llm.distributed import xla_flags
from jaxrl_llm.metrics import profiling


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five RL steps with the sampler's log-probs as old ones, scored every second step, moments and reference on the host."""
    run_dir = tmp_path_factory.mktemp("fast") / "run"
    fields = {"old_logprobs": "'sampler'", "score_every": 2, "offload_reference": True}
    done = tiny_run.launch(
        run_dir, SFT_STEPS=1, PROFILE_STEPS=(5,), EVALUATE_EVERY=100, SAVE_EVERY=100,
        **{f"rl/train.Stage.{n}": v for n, v in fields.items()}, **{"grpo.GRPO.entropy_coef": 0.0, "rl/train.Optimizer.offload": True},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "traced into" in done.stdout
    return run_dir


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}


def test_steps_after_the_first_of_each_phase_compile_nothing(fast: Path) -> None:
    """Step 1 is supervised; 2 is the first of reinforcement learning and the first that is scored; a new bucket of the sampler counts."""
    rows = metrics(fast)
    assert rows[1]["compilations/step"] > 0 and rows[2]["compilations/step"] > 0
    for step in (3, 4, 5):
        buckets = rows[step]["sampler/compilations"] - rows[step - 1]["sampler/compilations"]
        assert rows[step]["compilations/step"] <= 2 * buckets, rows[step]


def test_old_log_probs_of_the_sampler_save_the_forward_pass_but_where_the_gap_is_measured(fast: Path) -> None:
    rows = metrics(fast)
    assert {step for step, row in rows.items() if "gap/mean" in row} == {2, 4, 6}
    assert all(row["gap/mean"] < 1e-4 for step, row in rows.items() if step in (2, 4, 6))
    assert all(0 < rows[step]["grad_norm/policy"] < 1e3 for step in range(2, 7))
    assert rows[6]["loss/kl"] > 0  # the reference is scored in every step


def test_a_traced_step_can_be_read_and_holds_the_update(fast: Path) -> None:
    file = profiling.newest(fast / "tensorboard")
    assert file.parent.parent == fast / "tensorboard" / "plugins" / "profile"  # where TensorBoard's profile tab looks
    rows = profiling.summary(file)
    assert rows[-1]["kernel"] == "all" and rows[-1]["calls"] > 100
    assert [r["ms"] for r in rows[:-1]] == sorted((r["ms"] for r in rows[:-1]), reverse=True)


def test_flags_of_xla_are_added_for_several_gpus_and_never_change_the_users() -> None:
    assert xla_flags.settings(0, None, {}) == {}
    one = xla_flags.settings(1, None, {})
    host = int(one.pop("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"))
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0.88 * 1024 * kib - 1e9 < host * 1e9 <= 0.9 * 1024 * kib
    flags = (
        "--xla_gpu_enable_triton_gemm=false --xla_gpu_memory_limit_slop_factor=120 --xla_gpu_dot_merger_threshold_mb=8"
    )
    assert one == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "XLA_FLAGS": flags}
    own = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}
    found = xla_flags.settings(4, None, own)
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ".5"
    flags = dict(flag.lstrip("-").split("=") for flag in found["XLA_FLAGS"].split())
    assert flags["xla_gpu_enable_latency_hiding_scheduler"] == "false"
    assert flags["xla_gpu_enable_pipelined_all_gather"] == "true"
    assert "xla_tpu_overlap_compute_collective_tc=true" in xla_flags.settings(0, "", {})["LIBTPU_INIT_ARGS"]
    kinds = {kind: xla_flags.settings(0, kind, {})["LIBTPU_INIT_ARGS"].split() for kind in ("", "v5e", "v5p", "v6e")}
    assert all("--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000" in flags for flags in kinds.values())
    sparse = "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true"
    assert [kind for kind, flags in kinds.items() if sparse in flags] == ["v5p", "v6e"]
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_x=1"}
    assert xla_flags.apply(environment) == {} and environment["XLA_FLAGS"] == "--xla_cpu_x=1"


def test_tpus_are_seen_by_either_driver(tmp_path: Path) -> None:
    assert xla_flags.tpus(tmp_path) == 0
    (tmp_path / "accel0").touch()
    (tmp_path / "vfio").mkdir()
    for name in ("vfio", "0", "1"):  # the first is the driver's own, whatever hangs on it
        (tmp_path / "vfio" / name).touch()
    assert xla_flags.tpus(tmp_path) == 3


def test_the_kind_of_a_tpu_is_read_from_the_bus_where_the_environment_does_not_name_it(
    tmp_path: Path, monkeypatch
) -> None:
    from jax._src import hardware_utils

    known = {name: kind.name for name, kind in hardware_utils._TPU_PCI_DEVICE_IDS.items()}
    assert all(known[device] == kind for device, kind in xla_flags.PCI_KINDS.items())
    assert {"v5p", "v6e"} <= set(
        xla_flags.PCI_KINDS.values()
    ) and xla_flags.GOOGLE == hardware_utils._GOOGLE_PCI_VENDOR_ID

    def bus(*chips: tuple[str, str]) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for place, (vendor, device) in enumerate(chips):
            chip = folder / f"0000:00:0{place}.0"
            chip.mkdir(parents=True)
            (chip / "vendor").write_text(f"{vendor}\n")
            (chip / "device").write_text(f"{device}\n")
        return folder

    # A network card of Google's, and another maker's card whose number is that of a v5p.
    others = ("0x1ae0", "0x0042"), ("0x10de", "0x0062")
    assert xla_flags.tpu_kind({}, bus(*others)) == "" == xla_flags.tpu_kind({}, tmp_path / "none")
    trillium = bus(*others, ("0x1ae0", "0x006f"), ("0x1ae0", "0x006f"))
    assert xla_flags.tpu_kind({}, trillium) == "v6e"
    assert xla_flags.tpu_kind({}, bus(("0x1ae0", "0x0062"))) == "v5p"
    assert xla_flags.tpu_kind({"TPU_ACCELERATOR_TYPE": "v5p-128"}, trillium) == "v5p"

    # A host with chips and no name of them gets the flags that --topology compiles with.
    read = xla_flags.tpu_kind
    monkeypatch.setattr(xla_flags, "tpus", lambda: 2)
    monkeypatch.setattr(xla_flags, "tpu_kind", lambda environment: read(environment, trillium))
    monkeypatch.setattr(xla_flags.importlib.util, "find_spec", lambda name: name == "libtpu")
    assert xla_flags.apply({}) == xla_flags.settings(0, "v6e", {})


def test_a_folder_without_a_trace_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="set PROFILE_STEPS"):
        profiling.newest(tmp_path)
