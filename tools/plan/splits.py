"""Which of a run's nodes generate, train, or do both, and the Helm values of such a split.

Both stages run at the same time, the slower one sets the pace (StreamRL, arXiv 2504.15930, Alg. 1);
nodes that do both take turns. All splits are tried.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from scheduler.policy.node_split import StageProfile
from services.chassis.errors import ConfigError
from services.node_agent.known_devices import Device
from tools.plan.engine_size import EngineSize
from tools.plan.run_shape import RunShape
from tools.plan.step_seconds import Measured, StepSeconds, step_seconds
from tools.plan.training_count import TrainingCount
from trainer.model.context_ranks import check_ranks

_ROLLOUT, _TRAIN, _BOTH = ("rollout",), ("train",), ("rollout", "train")
_EQUAL = 1e-9
"""Relative difference of steps that are equally long."""
_Stage = Literal["generation", "training"]
_PROFILES = TypeAdapter(dict[_Stage, dict[int, float]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A split of nodes, and what it takes."""

    shape: RunShape
    """The run on these nodes."""
    seconds: StepSeconds
    dollars: float
    """Of a step, for all of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Makes splits of one run.

    Args:
        shape: of the run.
        count: of a micro-batch of rollouts of mean length.
        state: of a micro-batch of the longest rollouts, which must fit.
        size: of the model in an engine.
        device: of all nodes.
        train_device: of the nodes that train; None: the same, so that nodes may do both.
        measured: seconds by number of nodes in place of rooflines.
    """

    shape: RunShape
    count: TrainingCount
    state: TrainingCount
    size: EngineSize
    device: Device
    train_device: Device | None = None
    measured: Measured | None = None

    def of(self, shape: RunShape) -> Split:
        """The split that a run's nodes have."""
        seconds = step_seconds(
            shape,
            self.count,
            self.size,
            self.device,
            train_device=self.train_device,
            measured=self.measured,
        )
        hourly = sum(
            shape.devices_of(tags)
            * (self.train_device or self.device if "train" in tags else self.device).price
            for tags in shape.nodes
        )
        return Split(shape=shape, seconds=seconds, dollars=hourly * seconds.step / 3600)

    def best(self, num_nodes: int) -> list[Split]:
        """The fastest split in which no node does both, then the one in which trainers do.

        Of equals that with the fewest nodes. Either lacks where nothing fits the devices.
        """
        kinds = [_TRAIN] if self.train_device else [_TRAIN, _BOTH]
        found = (self._best(num_nodes, tags) for tags in kinds)
        return [split for split in found if split is not None]

    def _best(self, num_nodes: int, tags: tuple[str, ...]) -> Split | None:
        best: Split | None = None
        for trainers in range(1, num_nodes + ("rollout" in tags)):
            shape = self._shape(trainers, num_nodes - trainers, tags)
            if not self._fits(shape):
                continue
            split = self.of(shape)
            if math.isfinite(split.seconds.step) and (best is None or _is_faster(split, best)):
                best = split
        return best and self._fewest(best, tags)

    def _fewest(self, split: Split, tags: tuple[str, ...]) -> Split:
        """Give nodes back that generate and make a step no shorter."""
        trainers, alone = split.shape.trainer_nodes, len(split.shape.nodes)
        for rollouts in range(alone - trainers - 1, -1, -1):
            if not rollouts and tags == _TRAIN:
                break
            fewer = self.of(self._shape(trainers, rollouts, tags))
            if fewer.seconds.step > (1 + _EQUAL) * split.seconds.step:
                break
            split = fewer
        return split

    def _shape(self, trainers: int, rollouts: int, tags: tuple[str, ...]) -> RunShape:
        nodes = (tags,) * trainers + (_ROLLOUT,) * rollouts
        return replace(self.shape, nodes=nodes, trainer_nodes=trainers)

    def _fits(self, shape: RunShape) -> bool:
        trainer = shape.trainer
        try:
            check_ranks(trainer.context_parallel, trainer.replicas, shape.ranks)
        except ValueError:
            return False
        state = self.state.shared_by(shape.ranks / self.shape.ranks)
        usable = (self.train_device or self.device).usable_bytes
        return shape.ranks % trainer.replicas == 0 and state.device_bytes <= usable


def _is_faster(split: Split, than: Split) -> bool:
    return split.seconds.step < (1 - _EQUAL) * than.seconds.step


def split_lines(configured: Split, best: list[Split], steps: int) -> Iterator[str]:
    """A line for each split, with the share of its node-seconds in which nodes are idle."""
    yield f"nodes, seconds of a step, dollars of {steps} steps"
    columns = ("roll out", "train", "both", "generation", "training", "step", "idle", "dollars")
    yield f"  {'':18}" + "".join(f"{column:>12}" for column in columns)
    yield _line("as configured", configured, steps)
    for split in best:
        yield _line("best, shared" if split.shape.shared_nodes else "best, apart", split, steps)
    if not best:
        yield "  no split of these nodes fits the device"


def _line(name: str, split: Split, steps: int) -> str:
    shape, seconds = split.shape, split.seconds
    shared = shape.shared_nodes
    numbers = (shape.rollout_nodes - shared, shape.trainer_nodes - shared, shared)
    times = (seconds.generation, seconds.training, seconds.step)
    cells = [*map(str, numbers), *(f"{each:.1f}" for each in times), f"{seconds.idle:.0%}"]
    cells.append(f"{steps * split.dollars:,.0f}")
    return f"  {name:18}" + "".join(f"{cell:>12}" for cell in cells)


def write_values(path: Path, shape: RunShape, settings: Mapping[str, str]) -> None:
    """Write the chart's node pools of a split, for `helm upgrade -f`.

    Args:
        path: of the file; JSON, which is YAML too.
        shape: of the run; its trainer's nodes all have the same tags.
        settings: of the trainer as a file has them, such as "trainer.dtype".

    Raises:
        ConfigError: the file cannot be written.
    """
    tags = _BOTH if shape.shared_nodes else _TRAIN
    train = {"replicas": shape.trainer_nodes, "trainerPods": shape.trainer_nodes}
    pools: dict[str, dict[str, Any]] = {"train": _pool(shape, tags) | train}
    alone = shape.rollout_nodes - shape.shared_nodes
    rollout = _pool(shape, _ROLLOUT) | {"replicas": alone}
    pools["rollout"] = rollout if alone else {"enabled": False}
    values: dict[str, Any] = {"nodePools": pools}
    text = "\n".join(f"{n} = {v}" for n, v in settings.items() if n.startswith("trainer."))
    if text:
        values["trainer"] = {"settings": tomllib.loads(text)["trainer"]}
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--values {path}: {error.strerror}") from error


def _pool(shape: RunShape, tags: tuple[str, ...]) -> dict[str, Any]:
    pool: dict[str, Any] = {"enabled": True, "tags": list(tags), "gpus": shape.devices_of(tags)}
    return pool | {"servers": shape.servers_per_node} if "rollout" in tags else pool


def read_profiles(path: Path) -> Measured:
    """Measured seconds of both stages: tables `[generation]` and `[training]`, nodes = seconds.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        tables = _PROFILES.validate_python(tomllib.loads(path.read_text(encoding="utf-8-sig")))
        generation, training = (
            StageProfile.of(tables.get(stage, {})) for stage in get_args(_Stage)
        )
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--profile {path}: {place}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"--profile {path}: {error}") from error
    return Measured(generation=generation, training=training)
