"""What the processes of an emulated run wrote down, put together like a simulated result."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.sim.simulator.cluster import NodeSeconds, node_tags
from bench.sim.simulator.simulation import Result, Setting

Line = Mapping[str, float]

_GRAIN_SECONDS = 1.0
"""Of this machine: the grain of the timeline."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Of one run. What it gives is in emulated seconds since the engines began."""

    setting: Setting
    """What was run."""
    speed: float
    """Emulated seconds in a second."""
    trainer_file: Path
    """The trainer's metrics."""
    gang_file: Path
    """What the training gang did."""
    engine_folder: Path
    """Where each engine wrote what it did."""

    def num_steps(self) -> int:
        """Optimizer steps that ended; a publish of their weights was begun, or put off."""
        return len(_lines(self.trainer_file)) // self.setting.mode.parts

    def weight_version(self, step: int) -> int:
        """That of the publish begun last when a step ended; 0: before the first one."""
        lines = _lines(self.trainer_file)[: step * self.setting.mode.parts]
        return int(lines[-1]["weight_version"]) if step > 0 else 0

    def starts(self) -> tuple[int, ...]:
        """Groups that were complete when each step requested its nodes."""
        return tuple(int(line["num_groups_at_start"]) for line in _lines(self.trainer_file))

    def result(self) -> Result:
        """Between the end of the last step of the warm-up and the end of the last step.

        Staleness and lag are the greatest of each lease, not of each group.
        """
        setting, lines = self.setting, _lines(self.trainer_file)
        parts = setting.mode.parts
        ends = [self._emulated(line["time"]) for line in lines[parts - 1 :: parts]]
        last = setting.warm_up + setting.steps
        within = lines[setting.warm_up * parts : last * parts]
        begin, end = ends[setting.warm_up - 1], ends[last - 1]
        return Result(
            seconds=end - begin,
            rollouts=setting.steps * setting.workload.rollouts_per_step,
            node_seconds=self._node_seconds(begin, end),
            staleness=tuple(int(line["max_staleness"]) for line in within),
            stretches={name: list(self._stretches(name, end)) for name in node_tags(setting.split)},
            step_ends=tuple(ends[:last]),
            lag=tuple(self._lag(lines, line) for line in within),
            turns=(),
        )

    def _lag(self, lines: Sequence[Line], line: Line) -> int:
        """Optimizer steps between the weights of a lease's oldest token and the lease's base."""
        oldest = line["base_weight_version"] - line["max_staleness"]
        known = (each for each in lines if "weight_version" in each)
        made = max((each["step"] for each in known if each["weight_version"] <= oldest), default=0)
        parts = self.setting.mode.parts
        return int((line["step"] - 1) // parts - made // parts)

    @cached_property
    def _engines(self) -> Mapping[str, list[Line]]:
        """Node -> its engine's notes: growing numbers."""
        files = sorted(self.engine_folder.glob("*.busy.jsonl"))
        return {file.name.removesuffix(".busy.jsonl"): _lines(file) for file in files}

    @cached_property
    def _gang(self) -> list[Line]:
        return _lines(self.gang_file)

    @cached_property
    def _zero(self) -> float:
        return min(lines[0]["time"] for lines in self._engines.values())

    def _emulated(self, moment: float) -> float:
        return (moment - self._zero) * self.speed

    def _node_seconds(self, begin: float, end: float) -> NodeSeconds:
        names = list(node_tags(self.setting.split))
        spent = (self._until(name, end) - self._until(name, begin) for name in names)
        total = sum(spent, NodeSeconds())
        return total + NodeSeconds(idle=len(names) * (end - begin) - total.total)

    def _stretches(self, name: str, end: float) -> Iterator[tuple[float, str]]:
        """What the node did most, grain by grain; equal neighbours are one stretch."""
        grain, doing = _GRAIN_SECONDS * self.speed, ""
        for number in range(int(end / grain)):
            spent = self._until(name, (number + 1) * grain) - self._until(name, number * grain)
            most = _most(spent + NodeSeconds(idle=grain - spent.total))
            if most != doing:
                doing = most
                yield number * grain, doing

    def _until(self, name: str, moment: float) -> NodeSeconds:
        """What the node did from the beginning to an emulated moment; never idle."""
        engine = (
            _at(self._engines[name], moment / self.speed + self._zero)
            if name in self._engines
            else {}
        )
        in_gang = "train" in node_tags(self.setting.split)[name]
        gang = self._gang_until(moment) if in_gang else {}
        return NodeSeconds(
            generation=engine.get("decode", 0.0) + engine.get("prefill", 0.0),
            repeated_prefill=engine.get("repeated_prefill", 0.0),
            training=gang.get("training", 0.0),
            switching=engine.get("switching", 0.0) + gang.get("switching", 0.0),
        )

    def _gang_until(self, moment: float) -> dict[str, float]:
        spent = dict.fromkeys(("training", "switching"), 0.0)
        for line in self._gang:
            begin, end = self._emulated(line["begin"]), self._emulated(line["end"])
            spent[str(line["doing"])] += max(min(end, moment) - max(begin, 0.0), 0.0)
        return spent


def _most(seconds: NodeSeconds) -> str:
    return max(NodeSeconds.__slots__, key=lambda name: getattr(seconds, name))


def _lines(file: Path) -> list[Line]:
    if not file.exists():
        return []
    whole = file.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _at(lines: Sequence[Line], moment: float) -> dict[str, float]:
    """Growing numbers at a moment between two lines."""
    place = bisect_right(lines, moment, key=lambda line: line["time"])
    if place == 0:
        return {}
    before, after = lines[place - 1], lines[min(place, len(lines) - 1)]
    span = after["time"] - before["time"]
    share = (moment - before["time"]) / span if span else 0.0
    return {name: before[name] + share * (after[name] - before[name]) for name in before}
