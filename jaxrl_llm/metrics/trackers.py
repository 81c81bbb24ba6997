"""Writers to optional experiment trackers: Trackio and MLflow.

Neither can remove what an interrupted run logged after the checkpoint from which it resumes. Such a start opens a new run,
`NAME-from-STEP`, and logs a warning; where nothing was logged after the checkpoint, the first run is continued.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.metrics.run_folder import replace_text
from jaxrl_llm.metrics.writers import library, plain, readable

_log = logging.getLogger(__name__)
BATCH = 1000  # most metrics that MLflow takes in one request


class Kept:
    """The run folder's record of a tracker's run: its name, its id and the last logged step.

    Args:
      file: the file of the record.
      name: name of a first run.
      resume_step: step of the checkpoint from which this start resumes; None for a new run.
    """

    def __init__(self, file: Path, name: str, resume_step: int | None) -> None:
        self._file = file
        known = json.loads(file.read_text()) if resume_step is not None and file.exists() else None
        self.name, self.id, self.last = name, "", -1
        if known is not None and known["last"] <= resume_step:
            self.name, self.id, self.last = known["name"], known["id"], known["last"]
        elif known is not None:
            self.name = f"{name}-from-{resume_step}"
            _log.warning(
                "%s has steps to %d, after the checkpoint of step %d: this start is logged as the run %s",
                known["name"], known["last"], resume_step, self.name,
            )  # fmt: skip

    @property
    def continued(self) -> bool:
        """Whether this start continues an earlier start's run."""
        return bool(self.id)

    def write(self, step: int) -> None:
        """Records that `step` was logged."""
        self.last = step
        replace_text(self._file, json.dumps({"name": self.name, "id": self.id, "last": step}) + "\n")


@dataclass(frozen=True, kw_only=True)
class Trackio:
    """Logs to Trackio: a local database that `trackio show` serves, or a given Space or server.

    Attributes:
      project: name of the project.
      name: name of the run; None takes the run folder's name.
      space_id: Hugging Face Space, such as "me/dashboard"; None logs locally.
      server_url: address of a Trackio server; None logs locally.
      rollouts_shown: most rollouts of a table.
    """

    project: str = "jaxrl_llm"
    name: str | None = None
    space_id: str | None = None
    server_url: str | None = None
    rollouts_shown: int = 8

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> "TrackioWriter":
        """Starts a run, or continues the folder's."""
        trackio = library("trackio", "train.Trackio")
        run_dir.mkdir(parents=True, exist_ok=True)
        return TrackioWriter(self, trackio, Kept(run_dir / "trackio_run.json", self.name or run_dir.name, resume_step))


class TrackioWriter:
    """Logs to one Trackio run."""

    def __init__(self, settings: Trackio, trackio: Any, kept: Kept) -> None:
        self._settings, self._trackio, self._kept = settings, trackio, kept
        resume = "must" if kept.continued else "never"
        where = {"space_id": settings.space_id, "server_url": settings.server_url}
        quiet = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
        self._run = trackio.init(project=settings.project, name=kept.name, resume=resume, **quiet, **where)
        kept.id = kept.name

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in values.items()}, step=step)
        self._kept.write(step)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if shown := [readable(row) for row in rows[: self._settings.rollouts_shown]]:
            cells = [{name: str(plain(value)) for name, value in row.items()} for row in shown]
            names = list(dict.fromkeys(name for row in cells for name in row))
            table = self._trackio.Table(columns=names, data=[[row.get(name, "") for name in names] for row in cells])
            self._run.log({"rollouts": table}, step=step)

    def text(self, name: str, text: str) -> None:
        self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```")})

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """Logs to MLflow: a tracking server, or a SQLite file in the run folder.

    Attributes:
      uri: tracking server, such as "http://127.0.0.1:5000"; None writes RUN/mlflow.db, which
        `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows.
      experiment: name of the experiment.
      name: name of the run; None takes the run folder's name.
    """

    uri: str | None = None
    experiment: str = "jaxrl_llm"
    name: str | None = None

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> "MLflowWriter":
        """Starts a run, or continues the folder's."""
        mlflow = library("mlflow", "train.MLflow")
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = Kept(run_dir / "mlflow_run.json", self.name or run_dir.name, resume_step)
        uri = self.uri or f"sqlite:///{run_dir.absolute() / 'mlflow.db'}"
        artifacts = None if self.uri else (run_dir / "mlflow_artifacts").absolute().as_uri()
        client = mlflow.MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = (
            found.experiment_id if found else client.create_experiment(self.experiment, artifact_location=artifacts)
        )
        return MLflowWriter(mlflow, client, experiment, kept)


class MLflowWriter:
    """Logs to one MLflow run."""

    def __init__(self, mlflow: Any, client: Any, experiment: str, kept: Kept) -> None:
        self._mlflow, self._client, self._kept = mlflow, client, kept
        if kept.continued:
            client.update_run(kept.id, status="RUNNING")
        else:
            kept.id = client.create_run(experiment, run_name=kept.name).info.run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        metric = self._mlflow.entities.Metric
        found = [metric(name, float(value), now, step) for name, value in values.items() if math.isfinite(value)]
        for start in range(0, len(found), BATCH):
            self._client.log_batch(self._kept.id, metrics=found[start : start + BATCH])
        self._kept.write(step)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._client.log_dict(self._kept.id, plain([readable(row) for row in rows]), f"rollouts/step{step}.json")

    def text(self, name: str, text: str) -> None:
        self._client.log_text(self._kept.id, text, f"{name}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._kept.id)
