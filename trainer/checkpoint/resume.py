"""Which checkpoint a trainer resumes from."""

from __future__ import annotations

from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.checkpoint_files import Checkpoint, WrongCheckpoint
from trainer.checkpoint.own_files import DamagedError
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.object_path import Folder
from trainer.tracking.tracker import Alarms

ACCEPT = "trainer.accept_lost_samples"


def find_checkpoint(config: TrainerConfig, alarms: Alarms) -> tuple[Folder, Checkpoint] | None:
    """The checkpoint to resume from; None: the run starts from its model.

    The newest intact one; each newer one that is damaged raises an alarm.

    Raises:
        WrongCheckpoint: `resume` is not set and there is a checkpoint, it is of another run, model
            or kind of training, or all are damaged.
    """
    found = _newest_intact(config.checkpoint.place, alarms)
    if found is None:
        return None
    folder, checkpoint = found
    if not config.resume:
        raise WrongCheckpoint(
            f"checkpoint.folder {config.checkpoint.place} holds a checkpoint of step "
            f"{checkpoint.step}: set resume to continue from it, or give another folder"
        )
    if checkpoint.run_id != config.run_id:
        raise WrongCheckpoint(
            f"checkpoint {folder} is of run {checkpoint.run_id!r}, not {config.run_id!r}: "
            "give the run's own checkpoint_folder"
        )
    if bool(checkpoint.base) != bool(config.lora.rank):
        raise WrongCheckpoint(
            f"checkpoint {folder} was written with{'' if checkpoint.base else 'out'} an adapter, "
            f"and lora.rank is {config.lora.rank}: set it back"
        )
    if checkpoint.base != config.base():
        raise WrongCheckpoint(
            f"checkpoint {folder} holds an adapter for other weights than those of model "
            f"{config.model}: give the model that the run started with"
        )
    return found


def _newest_intact(folder: Folder, alarms: Alarms) -> tuple[Folder, Checkpoint] | None:
    def report(error: DamagedError, kept: Folder) -> None:
        alarms.add(f"{error}; the checkpoint was set aside as {kept}, training resumes before it")

    try:
        return checkpoint_files.newest(folder, report)
    except DamagedError as error:
        raise WrongCheckpoint(
            f"{error}, and {folder} has no intact checkpoint: restore a copy of one there, or give "
            "another folder and run_id to start a new run"
        ) from error


async def take_over(
    config: TrainerConfig, samples: SampleClient, alarms: Alarms
) -> tuple[Folder, Checkpoint] | None:
    """Fence older trainers and find the newest checkpoint; None: there is none.

    Repeats until the checkpoint is the newest: a trainer may write one until it is fenced.

    Raises:
        WrongCheckpoint: as `find_checkpoint`, or the store has lost steps that the checkpoint
            covers, and `accept_lost_samples` is not set.
    """
    known = 0
    while True:
        step = _step(find_checkpoint(config, alarms))
        committed, leased = await samples.ledger_steps()
        if step > (known := max(known, leased)):
            lost = _lost(config, step, known)
            if not config.accept_lost_samples:
                raise WrongCheckpoint(f"{lost}; to go on without them, set {ACCEPT} = true")
            alarms.add(f"{lost}: training goes on without them")
        await samples.reconcile(step)
        found = find_checkpoint(config, alarms)
        if _step(found) == step:
            if committed > step:
                alarms.add(_undone(step, committed))
            return found


def _lost(config: TrainerConfig, step: int, leased: int) -> str:
    return (
        f"checkpoint.folder {config.checkpoint.place} holds a checkpoint of step {step}, and the "
        f"store knows run {config.run_id!r} up to step {leased} only: it has lost the samples and "
        f"rollouts of steps {leased + 1} to {step}. Restore a newer backup "
        "(docs/runbooks/restore.md)"
    )


def _undone(step: int, committed: int) -> str:
    return (
        f"the newest intact checkpoint is of step {step}, and steps up to {committed} were "
        f"committed, whose samples are never leased again: steps {step + 1} to {committed} are "
        "trained on new groups. If no tasks are left, submit more, or ask FinishTraining to end"
    )


def changed_settings(checkpoint: Checkpoint, config: TrainerConfig) -> list[str]:
    """Settings that differ from the checkpoint's and change results, as "name old → new"."""
    now, before = config.reproducibility_settings(), checkpoint.settings
    return [
        f"{name} {before[name]} → {now[name]}"
        for name in sorted(now.keys() & before.keys())
        if now[name] != before[name]
    ]


def _step(found: tuple[Folder, Checkpoint] | None) -> int:
    return 0 if found is None else found[1].step
