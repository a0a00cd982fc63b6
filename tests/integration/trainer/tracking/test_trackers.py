"""Trackers, read back with their own libraries: logged values are there, and runs are continued.

TensorBoard's is among the tools of development; `make test-trackers` installs the others.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from services.chassis import plugins
from services.chassis.errors import ConfigError
from tests.lib.trainer.support import trainer_config
from trainer.config import TrainerConfig
from trainer.tracking.tracker import TRACKERS, Tracker, Trackers, names

LOSS = "training/loss"


def config(folder: Path, *trackers: str) -> TrainerConfig:
    """A run called "my-run"."""
    return trainer_config(
        run_id="my-run", model=folder, checkpoint__folder=folder, tracking__trackers=tuple(trackers)
    )


def lives(folder: Path, name: str) -> None:
    """Steps 1 to 4, a crash that undid step 4, and steps 4 and 5 of the life after it."""
    for number, steps in enumerate(((1, 2, 3, 4), (4, 5))):
        tracker: Tracker = plugins.make("trackers", name, TRACKERS, config(folder, name))
        for step in steps:
            tracker.log(step, {LOSS: step + 0.5 * number, "timing_s/wait": 1.0})
        tracker.close()


def test_tensorboard_shows_every_step_once(tmp_path: Path) -> None:
    """The life before the crash is hidden from the step on that was trained again."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    lives(tmp_path, "tensorboard")
    events = event_accumulator.EventAccumulator(str(tmp_path / "trackers" / "my-run"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars(LOSS)]
    assert shown == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5)]
    assert "timing_s/wait" in events.Tags()["scalars"]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings that decide what a step computes."""
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    lives(tmp_path, "mlflow")
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/trackers/mlflow.db")
    experiment = client.get_experiment_by_name("seamflow")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "my-run"
    assert run.data.params["algorithm.name"] == "dapo"
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, LOSS)]
    assert sorted(history) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (4, 4.5), (5, 5.5)]


ODD = (
    *(f"reward/{name}" for name in ("acc@1", "acc_1", "acc_x0040_1", "a//b", "a/../up", "a/")),
    *(f"reward/{name}" for name in ("loss", "step", "~" * 200, "=" * 200)),
    "evaluation/pass@8",
)
"""Names of rewards that the store takes, some of which MLflow refuses."""


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_each_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as a metric of its own, with its value, beside the metrics of the step."""
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker: Tracker = plugins.make("trackers", "mlflow", TRACKERS, config(tmp_path, "mlflow"))
    tracker.log(1, {LOSS: 0.5, **{name: float(i) for i, name in enumerate(ODD)}})
    tracker.close()
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/trackers/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("seamflow").experiment_id])
    assert sorted(run.data.metrics.values()) == sorted([0.5, *map(float, range(len(ODD)))])
    assert run.data.metrics["reward/acc_x0040_1"] == 0.0
    assert run.data.metrics["reward/loss"] == ODD.index("reward/loss")


@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lives, under the id of the run; every number is in the files."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    lives(tmp_path, "wandb")
    files = sorted((tmp_path / "trackers" / "wandb").glob("offline-run-*/run-my-run.wandb"))
    assert len(files) == 2
    for file, steps in zip(files, ((1, 2, 3, 4), (4, 5)), strict=True):
        written = file.read_bytes()
        assert written.count(b"timing_s/wait") >= len(steps)


class Recording:
    """A plug-in tracker."""

    made: ClassVar[list[Recording]] = []

    def __init__(self, config: TrainerConfig) -> None:
        self.calls: list[object] = []
        self.run_id = config.run_id
        Recording.made.append(self)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep it."""
        self.calls.append((step, dict(numbers), threading.current_thread().name))

    def close(self) -> None:
        """Keep that."""
        self.calls.append("closed")


class Broken(Recording):
    """Its service is away."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Always."""
        raise ConnectionError("nobody there")


def test_a_tracker_that_fails_stops_neither_training_nor_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each error is logged; steps arrive in order, in a separate thread."""
    Recording.made.clear()
    trackers = Trackers(config(tmp_path, f"{__name__}:Broken", f"{__name__}:Recording"))
    for step in (1, 2):
        trackers.log(step, {"loss": 0.5, "seconds_wait": 2.0, "step": step})
    trackers.close()
    broken, recording = Recording.made
    assert broken.calls == ["closed"]
    thread = f"tracker-{__name__}:Recording"
    numbers = {"training/loss": 0.5, "timing_s/wait": 2.0}
    assert recording.calls == [(1, numbers, thread), (2, numbers, thread), "closed"]
    assert capsys.readouterr().out.count("nobody there") == 2


class Hanging(Recording):
    """Its service answers nothing."""

    released = threading.Event()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Blocks until the end of the test."""
        self.released.wait()  # waiting for it would exceed the test's time limit


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path) -> None:
    """Neither a step nor the end of the run waits for it."""
    trackers = Trackers(config(tmp_path, f"{__name__}:Hanging"))
    try:
        trackers.log(1, {"loss": 0.5})
        trackers.close(wait_seconds=0.01)
    finally:
        Hanging.released.set()


def test_an_unknown_tracker_is_rejected_by_name(tmp_path: Path) -> None:
    """At start, with those there are."""
    with pytest.raises(ConfigError, match=r"trackers is 'tensorbord': .*did you mean tensorboard"):
        Trackers(config(tmp_path, "tensorbord"))


def test_names_are_those_that_dashboards_know() -> None:
    """Phases as verl names them, everything else under training."""
    assert names({"seconds_train": 1.0, "loss": 2.0, "step": 3.0}) == {
        "timing_s/train": 1.0,
        "training/loss": 2.0,
    }


def test_an_evaluation_never_hides_steps(tmp_path: Path) -> None:
    """Of weights that are older than the first step that a restarted trainer logs."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    for steps in ((1, 2, 3), (4, 5)):
        trackers = Trackers(config(tmp_path, "tensorboard"))
        trackers.log_evaluation(steps[0] - 2, {"mean": steps[0] / 8})
        for step in steps:
            trackers.log(step, {"loss": float(step)})
        trackers.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "trackers" / "my-run"))
    events.Reload()
    assert [event.step for event in events.Scalars(LOSS)] == [1, 2, 3, 4, 5]
    shown = [(event.step, event.value) for event in events.Scalars("evaluation/mean")]
    assert shown == [(-1, 0.125), (2, 0.5)]
