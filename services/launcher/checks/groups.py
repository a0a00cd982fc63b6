"""Whether the groups of a run have something to compare."""

from __future__ import annotations

from pathlib import Path

from services.launcher.checks.process_settings import process_setting
from services.launcher.config import LauncherConfig
from services.lib.group_baseline import check_group_size


def check_groups(config: LauncherConfig, config_file: Path) -> None:
    """Refuse groups of one for an algorithm that compares the rollouts of a group.

    Agents that bring tasks of their own, and a dataloader with max_samples, choose the sizes.

    Raises:
        ConfigError: names the setting, its value and the cure.
    """
    given = process_setting(config, config_file, "dataloader.group_size")
    is_chosen = process_setting(config, config_file, "dataloader.max_samples") not in (None, 0, "0")
    if is_chosen or (config.tasks is None and not config.runs_environment):
        return
    is_own = str(given).isdecimal() and str(given) != "0"
    setting = "dataloader.group_size" if is_own else "launcher.group_size"
    size = int(str(given)) if is_own else config.group_size
    name = process_setting(config, config_file, "trainer.algorithm.name") or "dapo"
    check_group_size(setting, size, str(name))
