"""Trackers show the steps of a run. Built in: TensorBoard, W&B, MLflow.

Training never waits for a tracker or fails with it: each has a separate thread, and its errors are
logged.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from seamflow.token_text import Decode, load_decoder, token_numbers

from services.chassis import plugins
from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from trainer.config import TrainerConfig
from trainer.data.token_sequence import TokenSequence
from trainer.tracking.step_record import StepFile, StepRecord

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


class SampleTable:
    """Every `samples_every_steps`, some trained samples for `samples_file` and the trackers.

    A row has step, sample_id, task_id, weight_versions, rewards by name, the prompt's text, and
    the answer's: from the first trained token to the last, with tool results between them.
    """

    def __init__(self, config: TrainerConfig, trackers: Trackers) -> None:
        tracking = config.tracking
        has_reader = tracking.samples_file is not None or bool(tracking.trackers)
        self._every = tracking.samples_every_steps if has_reader else 0
        self._config = config
        self._trackers = trackers
        self._file = StepFile(tracking.samples_file)
        self._decode: Decode | None = None

    def begin(self, step: int) -> None:
        """Forget the samples of steps after `step`, which a crash undid."""
        self._file.begin(step, {})

    def add(self, record: StepRecord) -> None:
        """Show samples of a finished step, if one is due."""
        if not self._every or record.step % self._every:
            return
        rows = [self._row(record.step, each) for each in record.shown]
        self._file.append(rows)
        self._trackers.log_samples(record.step, rows)

    def _row(self, step: int, sequence: TokenSequence) -> dict[str, Any]:
        ids, mask = sequence.token_ids_T.tolist(), sequence.loss_mask_T
        first = int(mask.argmax()) if mask.any() else len(ids)
        return {
            "step": step,
            "sample_id": sequence.sample_id,
            "task_id": sequence.group_id,
            "weight_versions": sorted(set(sequence.weight_versions_T[mask].tolist())),
            "rewards": dict(sequence.rewards),
            "prompt": self._text(ids[:first]),
            "answer": self._text(ids[first:]),
        }

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._decode is None:
            self._decode = _decoder(self._config)
        return self._decode(token_ids)


def _decoder(config: TrainerConfig) -> Decode:
    """The tokenizer of the model; ids as numbers for a model without one."""
    try:
        return load_decoder(config.model)
    except ValueError as error:
        get_logger().info("samples_without_text", detail=str(error))
        return token_numbers


_MAX_ALARMS = 20
_MAX_CHARACTERS = 600


class Alarms:
    """The newest alarms of this process: in the log, in GetStatus, and so in the terminal."""

    def __init__(self) -> None:
        self.texts: deque[str] = deque(maxlen=_MAX_ALARMS)
        """Oldest first; each names what happened and the cure."""

    def add(self, text: str) -> None:
        get_logger().error("alarm", alarm=text)
        self.texts.append(text[:_MAX_CHARACTERS])
