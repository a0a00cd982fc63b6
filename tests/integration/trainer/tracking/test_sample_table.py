"""Samples of steps as text with rewards: the file, and what trackers get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.chassis import plugins
from tests.integration.trainer.tracking.test_trackers import Recording
from tests.lib.trainer.support import changed, make_samples, read_lines, trainer_config
from tests.lib.trainer.training import Training
from trainer.config import TrainerConfig
from trainer.data.token_sequence import sequence
from trainer.tracking.step_record import StepRecord
from trainer.tracking.tracker import TRACKERS, SampleTable, Trackers, columns_of

SEQUENCES = [sequence(each) for each in make_samples(0, groups=3, group_size=4)]
ROW = {
    "step": 2,
    "sample_id": "s",
    "task_id": "a|b",
    "weight_versions": [1, 2],
    "rewards": {"success": 0.5},
    "prompt": "<b>2\n",
    "answer": "4",
}


def config(folder: Path, *trackers: str, **settings: Any) -> TrainerConfig:
    """A table of three samples every second step; the model has no tokenizer."""
    made = trainer_config(
        run_id="my-run", model=folder, checkpoint__folder=folder, tracking__trackers=tuple(trackers)
    )
    given = {
        "tracking__samples_every_steps": 2,
        "tracking__num_samples": 3,
        "tracking__samples_file": folder / "samples.jsonl",
        **settings,
    }
    return changed(made, **given)


def step(number: int, num_shown: int = 3) -> StepRecord:
    """A finished step."""
    record = StepRecord(number, 0)
    record.add(SEQUENCES)
    record.result({"loss": 0.5}, "reward", num_shown)
    return record


def test_every_so_many_steps_some_samples_of_all_groups_are_shown(tmp_path: Path) -> None:
    """Prompt and answer apart; together they are the sequence."""
    given = config(tmp_path)
    table = SampleTable(given, Trackers(given))
    table.begin(0)
    for number in (1, 2, 3, 4):
        table.add(step(number))
    rows = read_lines(tmp_path / "samples.jsonl")
    assert [row["step"] for row in rows] == [2, 2, 2, 4, 4, 4]
    shown = SEQUENCES[::4]
    assert [row["task_id"] for row in rows[:3]] == [each.group_id for each in shown]
    assert rows[0]["rewards"] == dict(shown[0].rewards)
    for row, each in zip(rows, shown, strict=False):
        prompt, answer = (
            [int(part) for part in row[name].split()] for name in ("prompt", "answer")
        )
        assert prompt + answer == each.token_ids_T.tolist()
        assert not each.loss_mask_T[: len(prompt)].any()
        assert each.loss_mask_T[len(prompt)]


def test_samples_of_steps_that_a_crash_undid_are_forgotten(tmp_path: Path) -> None:
    """As those of the metrics file are."""
    for begun, steps in ((0, (2, 4)), (3, (4, 6))):
        table = SampleTable(config(tmp_path), Trackers(config(tmp_path)))
        table.begin(begun)
        for number in steps:
            table.add(step(number, num_shown=1))
    assert [row["step"] for row in read_lines(tmp_path / "samples.jsonl")] == [2, 4, 6]


@pytest.mark.parametrize(
    "settings",
    [{"tracking__samples_every_steps": 0}, {"tracking__samples_file": None}],
    ids=["never", "nobody reads it"],
)
def test_without_a_table_nothing_is_written(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Nor is a tokenizer loaded."""
    given = config(tmp_path, **settings)
    SampleTable(given, Trackers(given)).add(step(2))
    assert not (tmp_path / "samples.jsonl").exists()


async def test_a_trainer_writes_them(training: Training, tmp_path: Path) -> None:
    """With the text of its model's tokenizer."""
    await training.fill(2)
    file = tmp_path / "samples.jsonl"
    await training.train(2, tracking__samples_every_steps=2, tracking__samples_file=file)
    rows = read_lines(file)
    assert [(row["step"], row["answer"]) for row in rows] == [(2, "d e f g")] * 4


class Showing(Recording):
    """A plug-in that shows samples."""

    def log_samples(self, step: int, rows: object) -> None:
        """Keep them."""
        self.calls.append((step, rows))


def test_trackers_get_samples_if_they_show_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One without the method is left in peace."""
    Recording.made.clear()
    given = config(tmp_path, f"{__name__}:Showing", f"{Recording.__module__}:Recording")
    trackers = Trackers(given)
    trackers.log_samples(2, [ROW])
    trackers.close()
    showing, recording = Recording.made
    assert (showing.calls, recording.calls) == ([(2, [ROW]), "closed"], ["closed"])
    assert "tracker_failed" not in capsys.readouterr().out


def test_rewards_become_columns() -> None:
    """A sample without one has none."""
    columns = columns_of([ROW, {**ROW, "rewards": {}}])
    assert columns["reward/success"] == [0.5, None]
    assert columns["weight_versions"] == ["1 2", "1 2"]
    assert list(columns)[-2:] == ["prompt", "answer"]


def logged(folder: Path, name: str) -> None:
    """A step and its samples in a tracker."""
    tracker: Any = plugins.make("trackers", name, TRACKERS, config(folder, name))
    tracker.log(2, {"training/loss": 1.0})
    tracker.log_samples(2, [ROW])
    tracker.close()


def test_tensorboard_shows_a_table(tmp_path: Path) -> None:
    """Nothing in the text breaks out of its cell."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    logged(tmp_path, "tensorboard")
    events = event_accumulator.EventAccumulator(str(tmp_path / "trackers" / "my-run"))
    events.Reload()
    (event,) = events.Tensors("training/samples/text_summary")
    lines = event.tensor_proto.string_val[0].decode().split("\n")
    assert event.step == 2
    assert lines[2] == "| 2 | a&#124;b | s | 1 2 | 0&#46;5 | &#60;b&#62;2<br> | 4 |"
    assert len(lines) == 3


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an artifact of the run."""
    pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged(tmp_path, "mlflow")
    (file,) = (tmp_path / "trackers" / "artifacts").rglob("samples/step_000000002.json")
    table = json.loads(file.read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True))["reward/success"] == 0.5


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file of the run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path, "wandb")
    (file,) = (tmp_path / "trackers" / "wandb").glob("offline-run-*/files/media/table/**/*.json")
    assert "reward/success" in file.read_text()
