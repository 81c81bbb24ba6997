"""Whole runs whose embedded sampler has devices of its own."""

from unittest import mock

import pytest
import tiny_run

from jaxrl_llm.interface import python_run

APART = {"embedded.EmbeddedSampler.devices": 1}
AHEAD = {**APART, "MAX_STALENESS": 1}


def test_a_run_on_policy_is_that_on_the_learners_device(tmp_path):
    apart, shared = tmp_path / "apart", tmp_path / "shared"
    for run_dir, devices, more, where in (
        (shared, 1, {}, "on its devices"),
        (apart, 2, APART, "on devices of its own (1)"),
    ):
        done = tiny_run.launch(run_dir, devices=devices, **more)
        assert done.returncode == 0, done.stderr
        assert where in done.stdout
    assert tiny_run.rows(apart) == tiny_run.rows(shared)


def test_batches_are_sampled_ahead_and_each_step_is_learned_once(tmp_path):
    run_dir = tmp_path / "run"
    done = tiny_run.launch(run_dir, devices=3, **AHEAD)
    assert done.returncode == 0, done.stderr
    learned = [row for row in tiny_run.rows(run_dir) if "staleness/max" in row]
    assert [row["step"] for row in learned] == [4, 5, 6, 7, 8]
    behind = [row["staleness/max"] for row in learned]
    assert behind[0] == 0 and set(behind[1:]) == {1}, (
        "the first batch is fresh, each other one begun under the version before"
    )
    assert all(row["count/stale"] == 0 for row in learned)
    assert learned[-1]["data/epoch"] == 5 * 4 / 64, "a prompt was lost or repeated"
    again = tiny_run.launch(run_dir, devices=3, STEPS=7, **AHEAD)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in tiny_run.rows(run_dir)] == list(range(11))


def test_a_run_on_policy_goes_on_ahead_where_it_is_told_to_and_not_back(tmp_path):
    run_dir = tmp_path / "run"
    done = tiny_run.launch(run_dir, devices=2, STEPS=2, **APART)
    assert done.returncode == 0, done.stderr
    more = {**AHEAD, "STEPS": 4}
    refused = tiny_run.launch(run_dir, devices=2, **more)
    assert (
        refused.returncode == 1
        and "max_staleness was 0, is 1" in refused.stderr
        and "--resume_as_new" in refused.stderr
    )
    done = tiny_run.launch(run_dir, devices=2, **more, **{"train.Run.resume_as_new": True})
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in tiny_run.rows(run_dir)] == list(range(8))
    assert tiny_run.rows(run_dir)[-1]["data/epoch"] == 4 * 4 / 64, "a prompt was lost or repeated"
    back = tiny_run.launch(run_dir, devices=2, STEPS=5, **APART)
    assert back.returncode == 1 and "max_staleness was 1, is 0. Set them as they were, or set RUN_DIR" in back.stderr


def test_adapters_are_served_beside_their_base(tmp_path):
    run_dir, gin_file = tmp_path / "run", tmp_path / "lora.gin"
    gin_file.write_text(f"include '{tiny_run.GIN_FILE}'\ninclude 'gin/adapters/lora.gin'\n")
    more = {**AHEAD, **tiny_run.RL_ALONE, "embedded.EmbeddedSampler.adapters": True, "STEPS": 3}
    done = tiny_run.launch(run_dir, gin_file=str(gin_file), devices=2, **more)
    assert done.returncode == 0, done.stderr
    rows = [row for row in tiny_run.rows(run_dir) if "gap/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["gap/max"] < 1e-4


def test_an_evaluation_in_python_has_all_devices_whatever_the_learners_mesh_is(tmp_path):
    files, mesh = [tiny_run.GIN_FILE], {**APART, "train.MeshConfig.fsdp": 7}
    run = python_run.opened(files, tiny_run.bindings(tmp_path / "run", **mesh))
    trained = mock.patch.object(python_run, "last_step", return_value=1)
    asked = mock.patch.object(python_run, "Harness", side_effect=InterruptedError)
    with trained, asked as harness, pytest.raises(InterruptedError):
        run.evaluate()
    assert harness.call_args.kwargs["mesh"].sizes(8) == (1, 8, 1, 1, 1)
    assert run.run.partitioner().mesh.devices.size == 7


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"MAX_STALENESS": 1}, "set embedded.EmbeddedSampler.devices, include gin/samplers/vllm.gin"),
        (APART, "must leave the learner at least one of the 1 devices"),
        ({**APART, "embedded.EmbeddedSampler.devices": 0, "train.MeshConfig.fsdp": 2}, "does not fit 1 devices"),
    ],
)
def test_what_cannot_be_is_refused_before_it_begins(tmp_path, more, why):
    assert why in tiny_run.refused(tmp_path / "run", **more)
