"""The dump of a step: its initial state, its commands and its results.

    dumps/step_000012/rank_00000_of_00002.safetensors    state before the step, as in a checkpoint
                      chunk_0000_rank_00000.npz          `Accumulate` of a chunk for a rank
                      step.json                          settings and resulting metrics

`python -m trainer.step.replay_step FOLDER` computes the step again, without services.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from trainer.config import TrainerConfig
from trainer.data.computations import Accumulate
from trainer.ranks.commands import decode, encode
from trainer.ranks.rank_group import RankGroup

__all__ = ["StepDump", "StepDumpWriter", "read_dump"]

_STEP = "step.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDump:
    """A step that can be replayed."""

    folder: Path
    """The folder of the dump."""
    step: int
    """Number of the step."""
    world_size: int
    """Number of ranks that computed it."""
    config: TrainerConfig
    """The settings that determine its results."""
    metrics: Mapping[str, float]
    """Its results."""

    def chunks(self) -> Iterator[list[Accumulate]]:
        """The commands of each gradient chunk, in rank order."""
        for number in count():
            paths = [_chunk_file(self.folder, number, rank) for rank in range(self.world_size)]
            if not paths[0].exists():
                return
            commands = [decode(path.read_bytes()) for path in paths]
            yield [command for command in commands if isinstance(command, Accumulate)]


class StepDumpWriter:
    """Dumps every `checkpoint.dump_every`-th step of a run; 0 for none."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._step: int | None = None
        self._num_chunks = 0

    def start(self, step: int) -> Path | None:
        """Create the folder of a step's dump; None: the step is not dumped."""
        if self._config.checkpoint.dump_every == 0 or step % self._config.checkpoint.dump_every:
            return None
        self._step, self._num_chunks = step, 0
        folder = self._folder(step)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("chunk_*_rank_*.npz"), folder / _STEP):  # that a crash undid
            old.unlink(missing_ok=True)
        return folder

    def add_chunk(self, step: int, commands: Sequence[Accumulate]) -> None:
        """Write the commands of a gradient chunk, if the step is dumped."""
        if step != self._step:
            return
        for rank, command in enumerate(commands):
            _chunk_file(self._folder(step), self._num_chunks, rank).write_bytes(encode(command))
        self._num_chunks += 1

    def finish(self, step: int, ranks: RankGroup, metrics: Mapping[str, float]) -> None:
        """Write settings and metrics, if the step is dumped; `ranks` computed it."""
        if step != self._step:
            return
        settings = {**self._config.reproducibility_settings(), **_other_settings(self._config)}
        settings["replicas"] = ranks.replicas
        content = {
            "step": step,
            "world_size": ranks.world_size,
            "settings": settings,
            "metrics": dict(metrics),
        }
        (self._folder(step) / _STEP).write_text(json.dumps(content, indent=1))

    def _folder(self, step: int) -> Path:
        return self._config.checkpoint.folder / "dumps" / f"step_{step:09d}"


def read_dump(folder: Path) -> StepDump:
    """Read the dump in `folder`.

    Raises:
        ValueError: there is none, or its step was not finished.
    """
    file = folder / _STEP
    if not file.exists():
        raise ValueError(f"{folder} has no {_STEP}: give the folder of a dump of a finished step")
    content: dict[str, Any] = json.loads(file.read_text())
    settings = {"run_id": "replay", "checkpoint.folder": folder, **content["settings"]}
    return StepDump(
        folder=folder,
        step=content["step"],
        world_size=content["world_size"],
        config=TrainerConfig.model_validate(_nested(settings)),
        metrics=content["metrics"],
    )


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, as nested tables."""
    nested: dict[str, Any] = {}
    for path, value in settings.items():
        table, _, name = path.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[name] = value
    return nested


def _other_settings(config: TrainerConfig) -> dict[str, str | int | bool]:
    """Settings a replay needs in addition to `reproducibility_settings`."""
    return {
        "model": str(config.model.resolve()),
        "num_steps": config.num_steps,
        "context_parallel": config.context_parallel,
        "attention": config.attention,
        "pipeline.critic_stages": config.pipeline.critic_stages,
        "activation_checkpointing": config.checkpoints_activations,
        "cpu_offload": config.cpu_offload,
        "device": config.device,
        "threads": config.threads,
    }


def _chunk_file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"chunk_{number:04d}_rank_{rank:05d}.npz"
