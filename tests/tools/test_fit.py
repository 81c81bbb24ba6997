"""The settings that are chosen for a device fit it, are the same each time and are kept by a resumed run."""

from pathlib import Path
from typing import Any

import jax
import pytest
import tiny_run

from jaxrl_llm import command_line, launch
from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.learner import example
from jaxrl_llm.tools import fit, memory, plan, programs
from jaxrl_llm.tools.planning import run_plan
from jaxrl_llm.train.build import learner_of

MIB = 2**20
# 19 million parameters, whole on each device, so that the state (369 MiB with the reference) is larger than a micro-batch.
LARGER = {
    "qwen3.Qwen3.width": 512, "qwen3.Qwen3.layers": 8, "qwen3.Qwen3.mlp_width": 1536, "PROMPTS_PER_STEP": 64,
    "train.MeshConfig.fsdp": 1, "train.MeshConfig.data": 8,
}  # fmt: skip


def built(run_dir: Path, **more: Any) -> tuple[Any, str]:
    return command_line.build([tiny_run.GIN_FILE], tiny_run.bindings(run_dir, **tiny_run.RL_ALONE, **more))


def test_a_device_is_named_or_given_in_gib() -> None:
    assert fit.named("RTX4090").bytes == 24 * 2**30 and fit.named("mine=48") == fit.Device("mine", 48 * 2**30)
    assert fit.named(None).bytes > 2**27  # this machine's memory, or its share of it
    with pytest.raises(
        ValueError, match=r"--device must be one of t4, l4, .*, or NAME=GIB such as mine=48 \(got 'h20'\)"
    ):
        fit.named("h20")


def test_the_choice_fits_grows_with_the_device_and_is_the_same_each_time(tmp_path: Path) -> None:
    run, _ = built(tmp_path, **LARGER)
    policy = run.policy.policy(Partitioner.create(run.mesh))
    numbers = run_plan._count(policy.abstract())
    found = {}
    for size in (330, 380, 1000, 4000):
        device = fit.Device("d", size * MIB)
        found[size] = fit.choose(run, device)
        assert 8 * numbers < found[size].needed <= fit.room(run, policy, device), (
            "weights and gradients, and no more than there is"
        )
    assert found[330] == fit.choose(run, fit.Device("d", 330 * MIB))
    small, some, more, most = found.values()
    assert small.offload and not most.offload and most.moments == "float32"
    assert some.rows <= more.rows <= most.rows and fit.REMATS.index(most.remat) <= fit.REMATS.index(some.remat)
    assert fit.choose(run, fit.Device("none", 50 * MIB)) is None


def test_the_estimate_is_of_the_size_of_the_compiled_programs_account(tmp_path: Path) -> None:
    run, _ = built(tmp_path, **LARGER, ROWS=8, ROW_TOKENS=64)
    policy = run.policy.policy(Partitioner.create(run.mesh))
    (line,) = programs.peaks(run)
    compiled = float(line.split()[3]) * 2**30
    assert 0.7 < fit.needed(run, policy) / compiled < 1.5


def test_several_micro_batches_take_a_second_gradient_as_the_compiled_program_does(tmp_path: Path) -> None:
    held = {}
    for rows in (8, 64):  # a mini-batch of 32 sequences of the greatest length, in rows of one each
        run, _ = built(tmp_path, **LARGER | {"PROMPTS_PER_STEP": 16}, MINIBATCHES=2, ROWS=rows, ROW_TOKENS=32)
        policy, (stage,) = run.policy.policy(Partitioner.create(run.mesh)), run.stages
        setting, tokens = fit.setting_of(policy, stage, policy.remat), rows // policy.partitioner.batch_shards * 32
        held[rows] = fit.needed(run, policy) - fit.activations(setting, tokens, policy.compute_dtype)
    gradient = 4 * run_plan._count(policy.abstract())
    assert held[8] - held[64] == pytest.approx(gradient, rel=0.01)
    learner = learner_of(stage, policy, 0)
    sums = memory.of_learner(learner, example.batch_of(stage, learner), 2)["accumulate"]
    assert sums.arguments > 2 * gradient, "the weights and the sum"
    assert sums.temporary > gradient, "the gradient of the micro-batch that is added"


def test_what_is_held_does_not_depend_on_the_rows_of_the_last_micro_batches(tmp_path: Path) -> None:
    found = []
    for tail in (0, 8):  # a multiple of the eight shards, which one row is not
        run, _ = built(tmp_path, **LARGER | {"train.Packing.tail": tail}, ROWS=16, ROW_TOKENS=32)
        found.append(fit.needed(run, run.policy.policy(Partitioner.create(run.mesh))))
    assert found[0] == found[1]


def test_an_offloaded_update_takes_the_moments_that_come_to_the_device(tmp_path: Path) -> None:
    run, _ = built(tmp_path, **LARGER, **{"train.Optimizer.offload": True}, ROWS=64, ROW_TOKENS=32, MINIBATCHES=8)
    policy, (stage,) = run.policy.policy(Partitioner.create(run.mesh)), run.stages
    assert not example.summed(stage)
    one = 4 * 8 * 512 * 1536  # bytes of each of the MLP's three arrays; the others are a single group
    parameters = 4 * run_plan._count(policy.abstract())
    # While the first group is updated no gradient is done, and moments of the MLP's first array move in beside the group's own.
    coming = 2 * (parameters - 3 * one) + 2 * one
    assert fit.Demand(run=run, stage=stage, policy=policy).working("full", 64) == pytest.approx(coming, rel=1e-3)
    assert fit.activations(fit.setting_of(policy, stage, "full"), 8 * 32, policy.compute_dtype) < coming


def test_a_gradient_in_bfloat16_takes_the_float32_sum_of_the_embedding_too(tmp_path: Path) -> None:
    narrow = {"sources.PolicySource.compute_dtype": "'bfloat16'", "train.Optimizer.gradients_dtype": "'bfloat16'"}
    run, _ = built(tmp_path, **LARGER | narrow)
    policy, (stage,) = run.policy.policy(Partitioner.create(run.mesh)), run.stages
    learner, numbers = learner_of(stage, policy, 0), run_plan._count(policy.abstract())
    leaves = jax.tree_util.tree_leaves_with_path(policy.abstract())
    scales = sum(x.size for path, x in leaves if path[-1].key == "scale")
    table = policy.abstract()["embedding"].size
    gradient = 2 * (numbers - scales) + 4 * scales
    assert fit.slopes(learner, copied=False) == gradient + 4 * table
    layers = sum(x.size for path, x in leaves if path[0].key == "layers")
    copied = layers - (scales - 512)  # all but the scales of layers, which stay float32
    assert fit.slopes(learner, copied=True) == pytest.approx(gradient + 4 * table + 2 * copied, rel=1e-3)


@pytest.mark.slow
def test_gradients_in_bfloat16_are_the_last_resort_and_the_largest_gradient_stays_free(tmp_path: Path) -> None:
    several = {"PROMPTS_PER_STEP": 512, "ROW_TOKENS": 512, "sources.PolicySource.compute_dtype": "'bfloat16'"}
    run, config = built(tmp_path, **LARGER | several)
    policy = run.policy.policy(Partitioner.create(run.mesh))
    none, least, more = (fit.Device("d", size * MIB) for size in (320, 340, 380))
    assert fit.choose(run, none) is None
    first, second = fit.choose(run, least), fit.choose(run, more)
    assert first is not None and first.gradients == "bfloat16" and first.offload
    assert second is not None and second.gradients is None and second.offload
    largest = 4 * 8 * 512 * 1536  # an array of the MLP, float32, all layers: of this shape there is nothing larger
    assert fit.room(run, policy, least) == pytest.approx(fit.USABLE * least.bytes - largest)
    assert list(fit.fitted(run, config, least))[-1] == "train.Optimizer.gradients_dtype = 'bfloat16'"


def test_the_lines_are_bindings_that_the_run_takes(tmp_path: Path) -> None:
    run, config = built(tmp_path, **LARGER)
    head, *lines = fit.fitted(run, config, fit.Device("small", 330 * MIB))
    assert head.startswith("# small: ") and head.endswith(" of 0.3 GiB")
    again, _ = command_line.build(
        [tiny_run.GIN_FILE], [*tiny_run.bindings(tmp_path, **tiny_run.RL_ALONE, **LARGER), *lines]
    )
    choice = fit.choose(run, fit.Device("small", 330 * MIB))
    assert choice is not None
    (stage,) = again.stages
    took = (stage.packing.rows, again.policy.remat, stage.optimizer.moments_dtype, stage.optimizer.offload)
    assert took == (choice.rows[0], choice.remat, choice.moments, choice.offload)
    with pytest.raises(
        MemoryError, match=r"does not fit: it takes 0.4 GiB before any activation a device, and none has .*fsdp"
    ):
        list(fit.fitted(run, config, fit.Device("none", 50 * MIB)))


def test_a_device_without_fit_is_refused_before_the_run_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(["--gin_file=there_is_no_such_file.gin", "--device=h200"])
    assert "--device is the device that --fit fits the run to: add --fit" in capsys.readouterr().err


def launched(run_dir: Path, *flags: str, **more: Any) -> int:
    bindings = [f"--gin={b}" for b in tiny_run.bindings(run_dir, **tiny_run.RL_ALONE, **more)]
    return launch.main([f"--gin_file={tiny_run.GIN_FILE}", *bindings, *flags])


def test_a_dry_run_that_does_not_fit_says_so_with_settings_that_do_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "peaks", lambda *_: pytest.fail("compiles"))
    monkeypatch.setattr(fit, "here", lambda: fit.Device("a small device", 420 * MIB))
    assert launched(tmp_path / "run", "--dry_run", **LARGER, ROWS=1024, ROW_TOKENS=512) == 1
    shown = capsys.readouterr()
    assert "stage rl: GRPO" in shown.out and "the run does not fit: it takes about " in shown.err
    assert "a small device has 0.4 GiB; these settings fit: ROWS = " in shown.err


def test_a_start_is_held_back_where_the_state_alone_is_too_large_and_warned_of_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_carry_out", lambda *_: 0)
    for size, code, word in ((50, 1, "error"), (420, 0, "warning"), (100_000, 0, "")):
        monkeypatch.setattr(fit, "here", lambda size=size: fit.Device("a device", size * MIB))
        assert launched(tmp_path / "run", **LARGER, ROWS=1024, ROW_TOKENS=512) == code
        assert capsys.readouterr().err.partition(":")[0] == word


def test_rows_that_are_auto_are_chosen_at_the_start_and_kept_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[Any] = []
    monkeypatch.setattr(launch, "_carry_out", lambda run, config, _: runs.append((run, config)) or 0)
    monkeypatch.setattr(fit, "here", lambda: fit.Device("a device", 4000 * MIB))
    assert launched(tmp_path / "run", **LARGER, ROWS="'auto'") == 0
    assert "rows = 'auto' takes for this device:\n  ROWS = " in capsys.readouterr().out
    run, config = runs[-1]
    rows = run.stages[0].packing.rows
    assert rows == fit.choose(run, fit.here()).rows[0] and f"\nROWS = {rows}\n" in config
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.gin").write_text(config.replace(f"\nROWS = {rows}\n", "\nROWS = 8\n"))
    assert launched(tmp_path / "run", **LARGER, ROWS="'auto'") == 0
    assert runs[-1][0].stages[0].packing.rows == 8, "what the folder was begun with"
    with (tmp_path / "run" / "config.gin").open("a") as file:
        file.write("\ntrain.Optimizer.gradients_dtype = 'float32'\n")
    kept = fit.bindings_of(*runs[0])
    assert kept[-1] == "train.Optimizer.gradients_dtype = 'float32'" and "ROWS = 8" in kept
    with pytest.raises(ValueError, match=r"train.Packing.rows must be a whole number >= 1, or 'auto' \(got 'many'\)"):
        built(tmp_path, ROWS="'many'")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    capsys.readouterr()
    assert launched(tmp_path / "run", ROWS="'auto'") == 1
    assert "is chosen by one process for its devices" in capsys.readouterr().err
