"""The user's code, tasks and settings, each read in a process that can do no harm here."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from seamflow.processes.left_processes import MARK, end_left

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.launcher.checks.run_settings import CHECK_TASKS, amount_of_tasks, check_settings
from services.launcher.child_process import ProcessPlan, settings_of
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.launcher.supervisor import child_environment

_MODEL_CHECKS = {
    "trainer": "trainer.model.check_models",
    "rollout_server": "rollout.server.check_model",
    "scoring": "services.scoring.check_model",
}
"""By table of a process that computes a model, what tries small models of its architectures."""


def checked_settings(
    config: LauncherConfig, plans: Mapping[str, ProcessPlan]
) -> Mapping[str, ServerConfig]:
    """`check_settings`; warnings are shown once, in a run by its processes."""
    with redirect_stderr(StringIO()) as warnings:
        settings = check_settings(plans.values())
    if config.dry_run:
        sys.stderr.writelines(dict.fromkeys(warnings.getvalue().splitlines(keepends=True)))
    return settings


def with_task_fields(
    plans: Mapping[str, ProcessPlan], settings: Mapping[str, ServerConfig]
) -> dict[str, ProcessPlan]:
    """The processes, of which those that read tasks require the fields that a tool loop names."""
    named = next(
        (each.task_fields for each in settings.values() if hasattr(each, "task_fields")), ()
    )
    changed = dict(plans)
    for name, each in settings.items():
        if named and hasattr(each, "required_fields"):
            fields = json.dumps(list(dict.fromkeys((*(each.required_fields or ()), *named))))
            given = settings_of(plans[name].table, required_fields=fields)
            changed[name] = replace(plans[name], environment={**plans[name].environment, **given})
    return changed


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


def checked_models(
    plans: Mapping[str, ProcessPlan], settings: Mapping[str, ServerConfig]
) -> list[str]:
    """Try the models of all processes, those of one kind and model once; a line for people each.

    What is still to be prepared is not tried, nor anything where torch is not installed.

    Raises:
        ConfigError: a model cannot be computed exactly, or lora.targets fit no layer.
    """
    checks: dict[tuple[str, Path], ProcessPlan] = {}
    for name, each in settings.items():
        folder, plan = getattr(each, "model", None), plans[name]
        is_tried = plan.table in _MODEL_CHECKS and find_spec("torch") is not None
        if is_tried and isinstance(folder, Path) and (folder / "config.json").is_file():
            command = (sys.executable, "-m", _MODEL_CHECKS[plan.table], *(plan.settings or ()))
            checks.setdefault((plan.table, folder), replace(plan, check=command))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        done = list(threads.map(_checked, checks.values()))
    if mistakes := [each.stderr.strip() for each in done if each.returncode]:
        raise ConfigError("\n".join(mistakes))
    return [line for each in done if (line := each.stdout.strip())]


def run_command(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Wait for a command, not for processes that it leaves, which are killed; its output.

    The output goes to files: a pipe ends only when everyone who has it ends, such as a server that
    a module of the user's starts when it is imported.
    """
    mark = secrets.token_hex(16)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                env={**environment, MARK: mark},
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        finally:
            end_left(mark)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)
