"""The record of a step: a line of the metrics file, and gauges for Prometheus.

The metrics file has one line for each step that led to the current weights, with its samples.
Lines of steps that a crash undid are removed when the run is resumed. A step that is repeated on
the same samples keeps the times and the weight version that it had first.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from services.chassis import metrics
from services.chassis.rpc import tracing
from services.lib.group_baseline import are_equal
from trainer import fsync_files
from trainer.data.token_sequence import TokenSequence, trainable_tokens

_SERVICE = "trainer"
_SAMPLES, _IDS = "trained_samples.jsonl", "sample_ids"
_OF_FIRST_TIME = (
    "time",
    "seconds",
    "seconds_after_last_sample",
    "tokens_per_second",
    "weight_version",
)
_GAUGES = (
    "loss",
    "reward_mean",
    "grad_norm",
    "entropy",
    "completion_tokens_mean",
    "share_equal_groups",
    "share_cut",
    "tokens_per_second",
    "max_staleness",
    "num_groups",
)


class StepRecord:
    """Metrics of one step, and the seconds of its phases."""

    def __init__(self, step: int, base_weight_version: int) -> None:
        self.step = step
        self.base_weight_version = base_weight_version
        self._numbers: dict[str, Any] = {"base_weight_version": base_weight_version}
        self._seconds: dict[str, float] = {}
        self._sequences: list[TokenSequence] = []
        self._trained: list[TokenSequence] = []
        self.shown: Sequence[TokenSequence] = ()
        """Sequences for people to look at."""
        self._sample_ids: list[str] = []
        self._begin_time = time.monotonic()
        self._arrival_time = 0.0
        self._max_staleness = 0

    @property
    def num_samples(self) -> int:
        """Samples the step is trained on so far."""
        return len(self._sequences)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as phase `name`: wait, lease, train, checkpoint or publish."""
        begin = time.monotonic()
        try:
            with tracing.span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begin

    def seconds(self, phase: str) -> float:
        return self._seconds.get(phase, 0.0)

    def started(self, num_groups: int) -> None:
        """Record how many groups were complete when the step requested its nodes."""
        self._numbers["num_groups_at_start"] = num_groups

    def interleaved(self, number: int) -> None:
        """Add tasks of a fused pipeline that filled idle times of another model."""
        if number:
            self._numbers["tasks_interleaved"] = self._numbers.get("tasks_interleaved", 0) + number

    def leased(self, max_staleness: int, base_weight_version: int | None = None) -> None:
        """Record that samples arrived, with their maximum staleness in versions.

        The base version is the one of the step's first lease; None: an older manager does not tell.
        """
        self._arrival_time = time.monotonic()
        self._max_staleness = max(self._max_staleness, max_staleness)
        if base_weight_version is not None:
            self.base_weight_version = base_weight_version
            self._numbers["base_weight_version"] = base_weight_version

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """Add sequences that the step is trained on; call it in the span of the step."""
        tracing.add_links(item.traceparent for item in sequences)
        self._sequences += sequences

    def result(
        self,
        numbers: Mapping[str, float],
        reward: str,
        num_shown: int = 0,
        *,
        compares_groups: bool = True,
    ) -> None:
        """Record the metrics of the optimizer step; `reward` names the trained reward.

        Of the sequences only `num_shown` are kept, spread over the step, once `take_sequences` was
        called. `compares_groups`: whether
        the algorithm learns from differences within groups.
        """
        self._sample_ids = [item.sample_id for item in self._sequences]
        self._numbers |= self._batch(reward, compares_groups) | dict(numbers)
        self._numbers["seconds_after_last_sample"] = time.monotonic() - self._arrival_time
        self.shown = _spread(self._sequences, num_shown)
        self._trained, self._sequences = self._sequences, []

    def take_sequences(self) -> Sequence[TokenSequence]:
        """The sequences of the finished step, in the order they were added, which it forgets."""
        trained, self._trained = self._trained, []
        return trained

    def _batch(self, reward: str, compares_groups: bool) -> dict[str, float]:
        rollouts = list({item.rollout_id: item for item in self._sequences}.values())
        # A batch may have no samples: rollouts without sampled tokens have none.
        trained = np.array([item.rewards[reward] for item in rollouts] or [math.nan])
        return {
            **other_rewards(rollouts, reward),
            "reward_mean": float(trained.mean()),
            "reward_std": float(trained.std()),
            **(equal_groups(rollouts, reward) if compares_groups else {}),
            **completion_lengths(self._sequences),
            **cut_rollouts(self._sequences, reward),
            "num_tokens": trainable_tokens(self._sequences),
            "num_samples": len(self._sequences),
            "num_rollouts": len(rollouts),
            "num_groups": len({item.group_id for item in rollouts}),
            "max_staleness": self._max_staleness,
        }

    def published(self, weight_version: int) -> None:
        """Record the newest version after the step, committed or in flight; the step is over."""
        self._numbers["weight_version"] = weight_version
        seconds = time.monotonic() - self._begin_time
        self._numbers["tokens_per_second"] = self._numbers.get("num_tokens", 0) / max(seconds, 1e-9)

    def numbers(self) -> dict[str, float]:
        """All finite metrics by name; the seconds of a phase as `seconds_<phase>`."""
        named = {f"seconds_{name}": seconds for name, seconds in self._seconds.items()}
        every = {"step": self.step, **self._numbers, **named}
        return {name: float(value) for name, value in every.items() if math.isfinite(value)}

    def line(self) -> dict[str, Any]:
        """The JSON object of the metrics file, to six digits: people read it."""
        seconds = {name: round(value, 4) for name, value in self._seconds.items()}
        return {
            "step": self.step,
            **{name: _readable(value) for name, value in self._numbers.items()},
            "seconds": seconds,
            "time": time.time(),
        }

    def samples(self) -> dict[str, Any]:
        """The JSON object of the file of trained samples."""
        return {"step": self.step, "sample_ids": self._sample_ids}

    def observe(self) -> None:
        for name in _GAUGES:
            if name in self._numbers:
                metrics.gauge(_SERVICE, name, f"{name} of the last step").set(self._numbers[name])
        metrics.gauge(_SERVICE, "step", "Finished optimizer steps").set(self.step)
        metrics.counter(_SERVICE, "trained_tokens_total", "Trainable tokens of all steps").inc(
            self._numbers.get("num_tokens", 0)
        )
        seconds = metrics.histogram(_SERVICE, "step_seconds", "Seconds of a step", ("phase",))
        for name, value in self._seconds.items():
            seconds.labels(name).observe(value)


class StepFile:
    """JSON lines of steps, such as the metrics file; without a path nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def begin(self, step: int, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Keep the lines of steps up to `step`; add `record` if the line of `step` is missing.

        Returns the lines of later steps, which are removed.
        """
        if self._path is None:
            return []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        every = list(_lines(self._path))
        lines = [line for line in every if line["step"] <= step]
        if record and all(line["step"] != step for line in lines):
            lines.append(dict(record))
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fsync_files.sync(partial)
        partial.replace(self._path)
        return [line for line in every if line["step"] > step]

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add the lines of a finished step, with its number as `step` in each."""
        if self._path is None:
            return
        with self._path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


class MetricsFile:
    """The metrics file, and beside it trained_samples.jsonl with the samples of each step."""

    def __init__(self, path: Path | None) -> None:
        self._metrics = StepFile(path)
        self._samples = StepFile(None if path is None else path.with_name(_SAMPLES))
        self._undone: dict[int, dict[str, Any]] = {}

    def begin(self, step: int, record: Mapping[str, Any]) -> None:
        """As `StepFile.begin`, with the record of a checkpoint: both objects in one."""
        metrics, samples = dict(record), {}
        if _IDS in record:
            samples = {"step": record["step"], _IDS: metrics.pop(_IDS)}
        trained = {line["step"]: line for line in self._samples.begin(step, samples)}
        undone = {line["step"]: line for line in self._metrics.begin(step, metrics)}
        self._undone = {n: undone[n] | trained[n] for n in undone.keys() & trained.keys()}

    def append(self, record: StepRecord) -> None:
        """Add a finished step; its samples first, so that no line of metrics is without them."""
        line, samples = record.line(), record.samples()
        before = self._undone.pop(record.step, {})
        if before.get(_IDS) == samples[_IDS]:
            line |= {name: before[name] for name in _OF_FIRST_TIME if name in before}
        self._samples.append([samples])
        self._metrics.append([line])


def _readable(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _spread(sequences: Sequence[TokenSequence], number: int) -> Sequence[TokenSequence]:
    """At most `number`, at equal distances."""
    count = min(number, len(sequences))
    return [sequences[index * len(sequences) // count] for index in range(count)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return  # a crash truncated the last line


def other_rewards(rollouts: Sequence[TokenSequence], trained: str) -> dict[str, float]:
    """Means of the rewards beside the trained one, as `reward/<name>`.

    No metric of ours has a slash, so that a reward may be called as one.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for item in rollouts:
        for name in item.rewards.keys() - {trained}:
            found[name].append(item.rewards[name])
    return {f"reward/{name}": float(np.mean(found[name])) for name in sorted(found)}


def completion_lengths(sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """Mean and maximum of the trainable tokens of a rollout, over all its sequences."""
    tokens: Counter[str] = Counter()
    for item in sequences:
        tokens[item.rollout_id] += int(item.loss_mask_T.sum())
    if not tokens:
        return {}
    lengths = list(tokens.values())
    return {
        "completion_tokens_mean": float(np.mean(lengths)),
        "completion_tokens_max": float(max(lengths)),
    }


def equal_groups(rollouts: Sequence[TokenSequence], reward: str) -> dict[str, float]:
    """Share of the step's groups whose rollouts have one trained reward, but for rounding.

    The rounding is that of `zero_variance_reward`, and the groups that it discarded never reach a
    step: they are dead letters. Each rollout is given once.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    for item in rollouts:
        rewards[item.group_id].append(item.rewards[reward])
    if not rewards:
        return {}
    return {"share_equal_groups": float(np.mean([are_equal(of) for of in rewards.values()]))}


def cut_rollouts(sequences: Sequence[TokenSequence], reward: str) -> dict[str, float]:
    """Share of rollouts that a limit cut off, or one of whose answers; and their mean reward."""
    rollouts = {item.rollout_id: item.rewards[reward] for item in sequences}
    cut = {item.rollout_id for item in sequences if item.cut}
    if not rollouts:
        return {}
    shares = {"share_cut": len(cut) / len(rollouts)}
    if cut:
        shares["reward_cut_mean"] = float(np.mean([rollouts[name] for name in cut]))
    return shares
