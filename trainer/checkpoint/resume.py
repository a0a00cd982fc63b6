"""Which checkpoint a trainer resumes from."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.checkpoint_files import Checkpoint
from trainer.clients import SampleClient
from trainer.config import TrainerConfig

__all__ = ["changed_settings", "find_checkpoint", "take_over"]


def find_checkpoint(config: TrainerConfig) -> tuple[Path, Checkpoint] | None:
    """The checkpoint to resume from; None: the run starts from its model.

    Raises:
        ValueError: `resume` is not set and there is a checkpoint, or it is of another run, model or
            kind of training.
    """
    found = checkpoint_files.newest(config.checkpoint.folder)
    if found is None:
        return None
    folder, checkpoint = found
    if not config.resume:
        raise ValueError(
            f"checkpoint.folder {config.checkpoint.folder} holds a checkpoint of step "
            f"{checkpoint.step}: set resume to continue from it, or give another folder"
        )
    if checkpoint.run_id != config.run_id:
        raise ValueError(
            f"checkpoint {folder} is of run {checkpoint.run_id!r}, not {config.run_id!r}: "
            "give the run's own checkpoint_folder"
        )
    if bool(checkpoint.base) != bool(config.lora.rank):
        raise ValueError(
            f"checkpoint {folder} was written with{'' if checkpoint.base else 'out'} an adapter, "
            f"and lora.rank is {config.lora.rank}: set it back"
        )
    if checkpoint.base != config.base():
        raise ValueError(
            f"checkpoint {folder} holds an adapter for other weights than those of model "
            f"{config.model}: give the model that the run started with"
        )
    return found


async def take_over(config: TrainerConfig, samples: SampleClient) -> tuple[Path, Checkpoint] | None:
    """Fence older trainers and find the newest checkpoint; None: there is none.

    Repeats until the checkpoint is the newest: a trainer may write one until it is fenced.
    """
    while True:
        step = _step(find_checkpoint(config))
        await samples.reconcile(step)
        found = find_checkpoint(config)
        if _step(found) == step:
            return found


def changed_settings(checkpoint: Checkpoint, config: TrainerConfig) -> list[str]:
    """Settings that differ from the checkpoint's and change the results of the steps."""
    now, before = config.reproducibility_settings(), checkpoint.settings
    return sorted(name for name in now.keys() & before.keys() if now[name] != before[name])


def _step(found: tuple[Path, Checkpoint] | None) -> int:
    return 0 if found is None else found[1].step
