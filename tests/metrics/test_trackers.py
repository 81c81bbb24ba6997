"""Trackers get what a run writes: the real packages in their offline modes."""

import json
import logging
import time

import pytest

from jaxrl_llm.metrics.trackers import Kept, MLflow, Trackio
from jaxrl_llm.metrics.writers import WandB, Writers

ROWS = [{"prompt": "a b", "response": "c d", "reward": 0.5, "streams": {"entropy": [0.1]}}]


def write_steps(writer, first, last):
    for step in range(first, last + 1):
        writer.write(step, {"reward/mean": step / 4, "entropy/mean": 2.0 - step / 8, "loss/nan": float("nan")})


def test_a_run_is_continued_where_nothing_was_logged_after_its_checkpoint(tmp_path):
    first = Kept(tmp_path / "kept.json", "mine", None)
    first.id = "7"
    first.write(4)
    same = Kept(tmp_path / "kept.json", "mine", 4)
    assert (same.name, same.id, same.continued) == ("mine", "7", True)
    anew = Kept(tmp_path / "kept.json", "mine", None)  # the folder's steps are not gone on from
    assert (anew.name, anew.continued) == ("mine", False)


def test_steps_after_the_checkpoint_are_never_logged_twice_into_one_run(tmp_path, caplog):
    first = Kept(tmp_path / "kept.json", "mine", None)
    first.id = "7"
    first.write(9)
    with caplog.at_level(logging.WARNING):
        other = Kept(tmp_path / "kept.json", "mine", 6)
    assert (other.name, other.continued) == ("mine-from-6", False)
    assert "has steps to 9, after the checkpoint of step 6" in caplog.text


def test_mlflow_holds_each_step_once_with_rollouts_and_texts(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'jaxrl-llm[mlflow]'")
    run_dir = tmp_path / "run"
    writer = Writers.open([MLflow()], run_dir, None)
    write_steps(writer, 1, 2)
    writer.rollouts(2, ROWS)
    writer.text("config", "STEPS = 4")
    writer.close()
    writer = Writers.open([MLflow()], run_dir, 2)
    write_steps(writer, 3, 4)
    writer.close()

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("jaxrl_llm").experiment_id])
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    (rollouts,) = (run_dir / "mlflow_artifacts").rglob("step2.json")
    assert json.loads(rollouts.read_text()) == [{"prompt": "a b", "response": "c d", "reward": 0.5}]

    writer = Writers.open([MLflow()], run_dir, 3)  # step 4 was logged after this checkpoint
    write_steps(writer, 4, 4)
    writer.close()
    names = {run.info.run_name for run in client.search_runs([found.info.experiment_id])}
    assert names == {"run", "run-from-3"} and len(client.get_metric_history(found.info.run_id, "reward/mean")) == 4


def test_trackio_holds_each_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="pip install 'jaxrl-llm[trackio]'")
    from trackio.sqlite_storage import SQLiteStorage

    writer = Writers.open([Trackio(project="tests")], tmp_path / "mine", None)
    write_steps(writer, 1, 2)
    writer.rollouts(2, ROWS)
    writer.close()
    writer = Writers.open([Trackio(project="tests")], tmp_path / "mine", 2)
    write_steps(writer, 3, 3)
    writer.close()
    assert SQLiteStorage.get_runs("tests") == ["mine"]
    logged = [row for row in SQLiteStorage.get_logs("tests", "mine") if "reward/mean" in row]
    assert [(row["step"], row["reward/mean"]) for row in logged] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_wandb_writes_offline_below_the_run_folder(tmp_path):
    pytest.importorskip("wandb", reason="pip install 'jaxrl-llm[wandb]'")
    writer = Writers.open([WandB(mode="offline")], tmp_path / "run", None)
    write_steps(writer, 1, 2)
    writer.rollouts(2, ROWS)
    writer.text("config.gin", "STEPS = 4")
    writer.close()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    limit = time.monotonic() + 20  # wandb's own process writes the file
    while b"STEPS = 4" not in file.read_bytes() and time.monotonic() < limit:
        time.sleep(0.1)
    held = file.read_bytes()
    assert b"STEPS = 4" in held and held.count(b"reward/mean") >= 2 and b"entropy/mean" in held
    (table,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/rollouts_2_*.table.json")
    assert json.loads(table.read_text())["data"] == [["a b", "c d", "0.5"]]


@pytest.mark.parametrize(("component", "package"), [(Trackio(), "trackio"), (MLflow(), "mlflow")])
def test_a_missing_package_says_how_to_install_it(component, package, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'jaxrl-llm\[{package}\]'"):
        component.open(tmp_path / "run", None)
    assert not (tmp_path / "run").exists()
