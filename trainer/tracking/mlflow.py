"""Tracker for MLflow: the server of MLFLOW_TRACKING_URI, or a database in `tracking.folder`."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from trainer.config import TrainerConfig
from trainer.tracking.tracker import Samples, columns_of

_TAG = "seamflow.run_id"
_MOST_CHARACTERS = 250
_NOT_TAKEN = re.compile(r"[^\w\-. ]|_(?=x)|^\.+$")
"""What MLflow refuses in a part of a name, and the beginning of what is written in its place."""


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
        metrics = [Metric(_name(name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_samples(self, step: int, rows: Samples) -> None:
        """Write the table as an artifact of the step; a repeated step replaces it."""
        assert self._client is not None
        columns = columns_of(rows)
        data = [list(row) for row in zip(*columns.values(), strict=True)]
        table = {"columns": list(columns), "data": data}
        self._client.log_dict(self._run_id, table, f"samples/step_{step:09d}.json")

    def close(self) -> None:
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
            client.create_experiment(self._config.tracking.project, self._artifacts())
            if experiment is None
            else experiment.experiment_id
        )
        name = self._config.run_id
        run = client.create_run(number, tags={_TAG: name}, run_name=name)
        for key, value in self._config.reproducibility_settings().items():
            client.log_param(run.info.run_id, key, value)
        created: str = run.info.run_id
        return created

    def _artifacts(self) -> str | None:
        """Where artifacts are without a server, which has a place of its own."""
        if "MLFLOW_TRACKING_URI" in os.environ:
            return None
        return (self._config.tracking_folder.resolve() / "artifacts").as_uri()


def _name(name: str) -> str:
    """A name that MLflow takes, another for each name.

    Characters that it refuses are written as `_xHHHH_`, as SQL/XML names have them (ISO 9075-14);
    of a name that is too long the end is a digest.
    """
    parts = [_NOT_TAKEN.sub(_codes, part) or "_x_" for part in name.split("/")]
    written = "/".join(parts)
    if len(written) <= _MOST_CHARACTERS:
        return written
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{written[: _MOST_CHARACTERS - len(digest) - 1]}_{digest}"


def _codes(found: re.Match[str]) -> str:
    return "".join(f"_x{ord(character):04X}_" for character in found.group())
