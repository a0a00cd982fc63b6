"""Trackers show the steps of a run. Built in: TensorBoard, W&B, MLflow.

Training never waits for a tracker or fails with it: each has a separate thread, and its errors are
logged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from services.chassis import plugins
from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from trainer.config import TrainerConfig

TRACKERS = {
    "tensorboard": "trainer.tracking.tensorboard:TensorBoard",
    "wandb": "trainer.tracking.wandb:WeightsAndBiases",
    "mlflow": "trainer.tracking.mlflow:MLflow",
}
_SECONDS = "seconds_"

Samples = Sequence[Mapping[str, Any]]
"""Rows of `SampleTable`."""


class Tracker(Protocol):
    """A plug-in. Its constructor takes the `TrainerConfig` and imports its library.

    The other methods are called from one thread; the first `log` connects to servers. One with
    `log_samples(step, rows)` too gets the samples of a step after its numbers.
    """

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log optimizer step `step`; after a crash some steps are repeated."""
        ...

    def close(self) -> None:
        """Flush and close; nothing is logged afterwards."""
        ...


class Trackers:
    """The configured trackers."""

    def __init__(self, config: TrainerConfig) -> None:
        """Load the trackers.

        Raises:
            ConfigError: a tracker is unknown, or its library is not installed.
        """
        self._feeds = [_Feed(name, _made(name, config)) for name in config.tracking.trackers]
        self._has_step = False
        self._early: list[tuple[int, Mapping[str, float]]] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue a step for every tracker."""
        self._has_step = True
        self._log(step, names(numbers))
        self._log_early()

    def log_samples(self, step: int, rows: Samples) -> None:
        """Queue samples of a step that was logged, for every tracker that shows samples."""
        for feed in self._feeds:
            feed.log_samples(step, rows)

    def log_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue the result of an evaluation, as `evaluation/<name>`, for every tracker.

        It waits for the first step: what a tracker gets first tells it where a crash undid steps.
        """
        self._early.append((step, {f"evaluation/{name}": value for name, value in numbers.items()}))
        if self._has_step:
            self._log_early()

    def _log_early(self) -> None:
        for step, named in self._early:
            self._log(step, named)
        self._early.clear()

    def _log(self, step: int, named: Mapping[str, float]) -> None:
        for feed in self._feeds:
            feed.log(step, named)

    def close(self, wait_seconds: float = 10.0) -> None:
        """Close every tracker; those that take longer than `wait_seconds` are abandoned."""
        self._log_early()
        for feed in self._feeds:
            feed.end()
        until = time.monotonic() + wait_seconds
        for feed in self._feeds:
            feed.join(max(until - time.monotonic(), 0.0))


def _made(name: str, config: TrainerConfig) -> Tracker:
    try:
        tracker: Tracker = plugins.make("trackers", name, TRACKERS, config)
    except ConfigError as error:
        if name in TRACKERS and isinstance(error.__cause__, ImportError):
            raise ConfigError(f"{error}: pip install 'seamflow[{name}]'") from error
        raise
    return tracker


class _Feed(threading.Thread):
    """The thread and queue of one tracker."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self._tracker = tracker
        self._queue: SimpleQueue[tuple[str, int, object] | None] = SimpleQueue()
        self.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._queue.put(("log", step, numbers))

    def log_samples(self, step: int, rows: Samples) -> None:
        if hasattr(self._tracker, "log_samples"):
            self._queue.put(("log_samples", step, rows))

    def end(self) -> None:
        self._queue.put(None)

    def run(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._try(*entry)
        self._try("close")

    def _try(self, call: str, *arguments: object) -> None:
        try:
            getattr(self._tracker, call)(*arguments)
        except Exception as error:  # an external service must not stop training
            get_logger().warning("tracker_failed", tracker=self.name, call=call, error=str(error))


def names(numbers: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics by tracker name: `training/<name>`, `timing_s/<phase>`, `reward/<name>`."""
    return {_name(name): value for name, value in numbers.items() if name != "step"}


def _name(name: str) -> str:
    if name.startswith("reward/"):
        return name
    if name.startswith(_SECONDS):
        return f"timing_s/{name.removeprefix(_SECONDS)}"
    return f"training/{name}"


def columns_of(rows: Samples) -> dict[str, list[Any]]:
    """The samples as columns of plain values, each reward as `reward/<name>`; None: it has none."""
    rewards = sorted({name for row in rows for name in row["rewards"]})
    columns: dict[str, list[Any]] = {
        name: [row[name] for row in rows] for name in ("step", "task_id", "sample_id")
    }
    columns["weight_versions"] = [" ".join(map(str, row["weight_versions"])) for row in rows]
    for name in rewards:
        columns[f"reward/{name}"] = [row["rewards"].get(name) for row in rows]
    return columns | {name: [row[name] for row in rows] for name in ("prompt", "answer")}
