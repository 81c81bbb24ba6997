"""Whole runs of models with experts, one of them with recurrent layers: what the sampler recorded is replayed, and a killed run goes on bit for bit."""

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import pytest
import stale_samples
import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("experts_run")]

GIN_FILES = {kind: str(Path(__file__).parents[1] / f"tiny_{kind}.gin") for kind in ("moe", "hybrid")}


@pytest.fixture(scope="module", autouse=True)
def compiled_as_users_compile() -> Iterator[None]:
    """The programs of these runs have all optimisations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
        yield


@pytest.fixture(scope="module", params=list(GIN_FILES))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a run that nothing disturbed: three supervised steps and five of reinforcement learning."""
    run_dir = tmp_path_factory.mktemp("experts") / "run"
    done = tiny_run.launch(run_dir, GIN_FILES[request.param])
    assert done.returncode == 0, done.stderr
    return run_dir


def test_a_run_replays_the_sampler_s_experts_and_reports_its_routers(whole: Path) -> None:
    rows = [row for row in tiny_run.rows(whole) if "loss/total" in row]
    assert len(rows) == 8
    for row in rows:
        routers = {name: value for name, value in row.items() if name.startswith("router/")}
        assert {
            "router/load_max",
            "router/load_min",
            "router/unused",
            "router/entropy",
            "router/weight_top1",
        } <= routers.keys()
        assert all(math.isfinite(value) for value in routers.values())
        assert (
            0 < row["router/entropy"] <= math.log(4) + 1e-6
            and -1 <= row["router/load_min"] <= 0 <= row["router/load_max"] <= 1
        )
    supervised, sampled = rows[:3], rows[3:]
    assert not any("router/differs" in row or "router/loss" in row for row in supervised)
    assert all(row["router/loss"] >= 1.99 for row in sampled)  # 2, the number of chosen experts, at an even load
    # The first of two minibatches learns with the weights that sampled, the second with newer ones.
    assert all(row["router/recorded"] == 1 and row["router/differs"] <= 0.1 for row in sampled)
    assert all(row["gap/mean"] < 1e-4 for row in sampled)


def test_stale_samples_are_read_with_the_recorded_experts_alone_where_they_are_replayed(whole: Path) -> None:
    """By the last checkpoint, of samples of its own and of those of the checkpoint two steps before it."""
    asked = stale_samples.Asked(prompts=8, samples=2, dtype="float32")
    with mock.patch.object(jax, "devices", return_value=jax.devices()[:1]):  # as the run, whose programs are smaller
        fresh, stale = stale_samples.measure(whole, [0, 2], asked)
    assert [(row["step"], row["lag"]) for row in (fresh, stale)] == [(8, 0), (8, 2)]
    for arm in ("live", "replayed"):
        assert fresh[arm]["differs"] == 0 == fresh[arm]["far"] and fresh[arm]["mean"] < 1e-5
        assert 1e-4 < stale[arm]["mean"] <= stale[arm]["p99"] <= stale[arm]["max"]
    assert stale["replayed"]["differs"] == 0 <= stale["live"]["differs"] < 1
    drawn = stale_samples.bands([fresh, stale, stale | {"run": "another", "live": fresh["live"]}])
    band = drawn["gap, nats, by steps behind"]["live"]
    assert band.steps.tolist() == [0, 2] and band.seeds.tolist() == [1, 2]
    assert (band.low[1], band.high[1]) == (fresh["live"]["mean"], stale["live"]["mean"])
    line = stale_samples.table([fresh, stale, stale]).splitlines()[-1]
    assert line.startswith(f"| 2 | {stale['live']['differs']:.3g} | 0 | {stale['live']['mean']:.3g} |")


def test_a_killed_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = tiny_run.interrupted(run_dir, lambda said: "step 6/8" in said, gin_file=str(whole))
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = tiny_run.launch(run_dir, gin_file=str(whole))
    assert done.returncode == 0 and "resuming from step" in done.stdout, done.stderr
    assert tiny_run.rows(run_dir) == tiny_run.rows(whole)


def test_a_sampler_that_records_nothing_cannot_be_replayed(tmp_path: Path) -> None:
    bindings = {"embedded.EmbeddedSampler.record_routes": False, **tiny_run.RL_ALONE}
    assert "set record_routes = True" in tiny_run.refused(tmp_path / "run", GIN_FILES["moe"], **bindings)


def test_silent_sequences_cannot_be_skipped_where_every_token_adds_to_the_balance(tmp_path: Path) -> None:
    bindings = {
        "rl/train.Stage.skip_silent": True,
        "train.Router.balance": 0.01,
        "grpo.GRPO.entropy_coef": 0.0,
        "grpo.GRPO.kl_coef": 0.0,
    }
    said = tiny_run.refused(tmp_path / "run", GIN_FILES["moe"], **bindings, **tiny_run.RL_ALONE)
    assert "train.Router.balance and bias_rate to 0" in said
