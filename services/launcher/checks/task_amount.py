"""Whether the tasks are enough for all optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from services.launcher.checks.process_settings import process_setting
from services.launcher.config import LauncherConfig

CHECK_TASKS = "services.dataloader.check_tasks"
"""Reads all tasks, and prints how many there are."""


def amount_of_tasks(
    config: LauncherConfig, config_file: Path, counted: Mapping[str, int | None]
) -> str | None:
    """One line for people; None: nobody has counted them.

    `counted`: "tasks", and "epochs", in which each is submitted once; 0: without end; "broken"
    rows, which are skipped.
    """
    tasks, epochs = counted["tasks"], counted["epochs"]
    steps = process_setting(config, config_file, "trainer.num_steps")
    if tasks is None or epochs is None or steps is None:
        return None
    needed = f"{steps} steps of {config.groups_per_step} groups of {config.group_size} rollouts"
    broken = f" ({counted['broken']} broken rows are skipped)" if counted.get("broken") else ""
    if epochs == 0:
        return f"{tasks} tasks{broken}, repeated, for {needed}"
    enough = tasks * epochs // config.groups_per_step
    times = f"{tasks} tasks{broken}, {epochs} time{'s' if epochs > 1 else ''} each"
    if enough >= int(str(steps)):
        return f"{times}, for {needed}"
    return (
        f"{times}, are enough for {enough} steps at most: {needed} are asked for; "
        "dataloader.epochs = 0 repeats the tasks"
    )
