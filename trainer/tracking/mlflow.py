"""Tracker for MLflow: the server of MLFLOW_TRACKING_URI, or a database in `tracking.folder`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from trainer.config import TrainerConfig

__all__ = ["MLflow"]

_TAG = "seamflow.run_id"


class MLflow:
    """A run of the experiment `tracking.project`; a resumed run continues it."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._client: MlflowClient | None = None
        self._run_id = ""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log all numbers in one request."""
        if self._client is None:
            self._client = self._connect()
        # MLflow shows the newer of two values for a step: that of the repeated step.
        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as ended."""
        if self._client is not None:
            self._client.set_terminated(self._run_id)

    def _connect(self) -> MlflowClient:
        folder = self._config.tracking_folder
        folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve()}/mlflow.db")
        client = MlflowClient(uri)
        self._run_id = self._find_run(client) or self._create_run(client)
        return client

    def _find_run(self, client: MlflowClient) -> str | None:
        experiment = client.get_experiment_by_name(self._config.tracking.project)
        if experiment is None:
            return None
        ours = f"tags.`{_TAG}` = '{self._config.run_id}'"
        runs = client.search_runs([experiment.experiment_id], filter_string=ours, max_results=1)
        if not runs:
            return None
        found: str = runs[0].info.run_id
        client.update_run(found, status="RUNNING")
        return found

    def _create_run(self, client: MlflowClient) -> str:
        experiment = client.get_experiment_by_name(self._config.tracking.project)
        number = (
            client.create_experiment(self._config.tracking.project)
            if experiment is None
            else experiment.experiment_id
        )
        name = self._config.run_id
        run = client.create_run(number, tags={_TAG: name}, run_name=name)
        for key, value in self._config.reproducibility_settings().items():
            client.log_param(run.info.run_id, key, value)
        created: str = run.info.run_id
        return created
