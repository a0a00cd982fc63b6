"""A step written down whole: what it began with, what it was told, what came of it.

    dumps/step_000012/rank_00000_of_00002.safetensors    state before the step, as in a checkpoint
                      part_0000_rank_00000.npz           `Accumulate` of a part to a rank
                      step.json                          settings, and the numbers that came of it

`python -m trainer.replay_step FOLDER` computes it again, alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from trainer.config import TrainerConfig
from trainer.policy.commands import Accumulate, decode, encode

__all__ = ["Dump", "DumpWriter", "read_dump"]

_STEP = "step.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A step that can be replayed."""

    folder: Path
    """Where it is; the state before it, too."""
    step: int
    """Its number."""
    world_size: int
    """Ranks that computed it."""
    config: TrainerConfig
    """All that decides what it computes."""
    numbers: Mapping[str, float]
    """What it gave."""

    def parts(self) -> Iterator[list[Accumulate]]:
        """What each rank was told, part by part."""
        for number in count():
            paths = [_part(self.folder, number, rank) for rank in range(self.world_size)]
            if not paths[0].exists():
                return
            commands = [decode(path.read_bytes()) for path in paths]
            yield [command for command in commands if isinstance(command, Accumulate)]


class DumpWriter:
    """Writes every so manieth step of a run."""

    def __init__(self, config: TrainerConfig) -> None:
        """As configured; with `dump_every` 0 nothing is written."""
        self._config = config
        self._step: int | None = None
        self._num_parts = 0

    def begin(self, step: int) -> Path | None:
        """A new folder for the state before the step, if that is to be written."""
        if self._config.dump_every == 0 or step % self._config.dump_every:
            return None
        self._step, self._num_parts = step, 0
        folder = self._folder(step)
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that a crash undid
        folder.mkdir(parents=True)
        return folder

    def part(self, step: int, commands: Sequence[Accumulate]) -> None:
        """What the ranks are told of a part."""
        if step != self._step:
            return
        for rank, command in enumerate(commands):
            _part(self._folder(step), self._num_parts, rank).write_bytes(encode(command))
        self._num_parts += 1

    def end(self, step: int, world_size: int, numbers: Mapping[str, float]) -> None:
        """What came of it."""
        if step != self._step:
            return
        settings = {**self._config.mathematics(), **_besides(self._config)}
        content = {
            "step": step,
            "world_size": world_size,
            "settings": settings,
            "numbers": dict(numbers),
        }
        (self._folder(step) / _STEP).write_text(json.dumps(content, indent=1))

    def _folder(self, step: int) -> Path:
        return self._config.checkpoint_folder / "dumps" / f"step_{step:09d}"


def read_dump(folder: Path) -> Dump:
    """The step that was written into `folder`.

    Raises:
        ValueError: there is none, or it was never finished.
    """
    file = folder / _STEP
    if not file.exists():
        raise ValueError(
            f"{folder} has no {_STEP}: give a folder that dump_every wrote, of a step that ended"
        )
    content: dict[str, Any] = json.loads(file.read_text())
    settings = content["settings"]
    config = TrainerConfig(
        run_id="replay",
        model=Path(settings.pop("model")),
        checkpoint_folder=folder,
        **settings,
    )
    return Dump(
        folder=folder,
        step=content["step"],
        world_size=content["world_size"],
        config=config,
        numbers=content["numbers"],
    )


def _besides(config: TrainerConfig) -> dict[str, str | int | bool]:
    """What a process needs that is no mathematics, or is the same in every step of a run."""
    return {
        "model": str(config.model.resolve()),
        "num_steps": config.num_steps,
        "activation_checkpointing": config.activation_checkpointing,
        "cpu_offload": config.cpu_offload,
        "device": config.device,
        "threads": config.threads,
    }


def _part(folder: Path, number: int, rank: int) -> Path:
    return folder / f"part_{number:04d}_rank_{rank:05d}.npz"
