"""The user's code, tasks and settings, each read in a process that can do no harm here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import Any

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.launcher.checks.run_settings import check_settings
from services.launcher.checks.task_amount import CHECK_TASKS, amount_of_tasks
from services.launcher.checks.user_command import run_command
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.launcher.supervisor import child_environment

__all__ = ["adapted_layers", "check_user_code", "checked_settings"]


def checked_settings(
    config: LauncherConfig, plans: Mapping[str, ProcessPlan]
) -> Mapping[str, ServerConfig]:
    """`check_settings`; warnings are shown once, in a run by its processes."""
    with redirect_stderr(StringIO()) as warnings:
        settings = check_settings(plans.values())
    if config.dry_run:
        sys.stderr.writelines(dict.fromkeys(warnings.getvalue().splitlines(keepends=True)))
    return settings


def check_user_code(
    config: LauncherConfig, layout: Layout, plans: Mapping[str, ProcessPlan]
) -> str | None:
    """Load the user's code and read all tasks, each in a process that can do no harm here.

    Returns:
        The number of tasks next to what training needs, if it is known.

    Raises:
        ConfigError: something cannot be used; it is named.
    """
    checks = {plan.check: plan for plan in plans.values() if plan.check is not None}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        done = dict(zip(checks, threads.map(_checked, checks.values()), strict=True))
    if mistakes := [_mistake(each) for each in done.values() if each.returncode]:
        raise ConfigError("\n".join(mistakes))
    counted = next((each.stdout for check, each in done.items() if CHECK_TASKS in check), "")
    lines = counted.splitlines()
    return amount_of_tasks(config, layout.config_file, json.loads(lines[-1])) if lines else None


def _mistake(done: subprocess.CompletedProcess[str]) -> str:
    said = done.stderr.strip().removeprefix("dataloader: ").removeprefix("evaluator: ")
    return said or f"loading the user's code ended with code {done.returncode}: {done.args[-1]}"


def _checked(process: ProcessPlan) -> subprocess.CompletedProcess[str]:
    assert process.check is not None
    return run_command(process.check, child_environment(process.environment))


def adapted_layers(plans: Mapping[str, ProcessPlan], settings: Mapping[str, ServerConfig]) -> str:
    """Which layers get an adapter; empty if none does, or the model is still to be prepared.

    Raises:
        ConfigError: lora.targets fit no layer.
    """
    name = next((name for name in settings if plans[name].table == "trainer"), None)
    trainer: Any = None if name is None else settings[name]
    if name is None or not trainer.lora.rank or not (trainer.model / "config.json").is_file():
        return ""
    command = (sys.executable, "-m", "trainer.model.adapted_layers", *(plans[name].settings or ()))
    done = _checked(replace(plans[name], check=command))
    if done.returncode:
        raise ConfigError(done.stderr.strip())
    return done.stdout.strip()
