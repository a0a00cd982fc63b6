"""Entry point: `seamflow train --config my.toml`, or `python -m services.launcher`.

`seamflow serve` is the same with --serve.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

from services.chassis.config.load import load, load_or_exit
from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError, ExitCode, StartupError
from services.launcher.agent_access import base_url
from services.launcher.checks.groups import check_groups
from services.launcher.checks.installed_extras import check_installed
from services.launcher.checks.loopback_hosts import check_hosts
from services.launcher.checks.process_settings import process_setting
from services.launcher.checks.run_settings import check_settings
from services.launcher.checks.task_amount import amount_of_tasks
from services.launcher.checks.thread_numbers import divided_threads, num_cores
from services.launcher.checks.user_command import run_command
from services.launcher.child_process import ProcessPlan
from services.launcher.config import (
    DEFAULT_FILE,
    LauncherConfig,
    flags_by_table,
    own_settings,
    with_file,
)
from services.launcher.evaluation.evaluation_config import EvaluationConfig
from services.launcher.evaluation.heldout_tasks import heldout_fields, read_tasks
from services.launcher.layout import AGENT_PORTS, Layout, free_ports
from services.launcher.process_plan import CHECK_TASKS, plan
from services.launcher.redis import redis_server
from services.launcher.report.run_end import recorded_end
from services.launcher.report.shown_summary import show_summary
from services.launcher.run import Run
from services.launcher.same_run import run_lock
from services.launcher.same_run.same_run import check_same_run, note_beginning
from services.launcher.supervisor import child_environment
from services.launcher.view import LiveView, PlainView
from services.lib.model_files.end_ids import warn_of_end
from services.lib.model_files.model_folder import check_chat_template, check_model_folder
from services.lib.model_files.text_config import check_attention

__all__ = ["check_evaluation", "check_program", "main", "make_layout"]

_TABLE = "evaluation"
_EMBEDDED = "torch"
_OF_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
_SHOWING = frozenset({"-h", "--help", "--version", "--print-config", "--check-config"})
"""Flags that need no file."""
_MIN_FREE_BYTES = 512 * 1024 * 1024


def main() -> NoReturn:
    """Train or serve; exits with a code of `ExitCode`, a run that Ctrl-C cut short with 130."""
    sys.argv[1:] = with_file(sys.argv[1:])
    config = _loaded(sys.argv)
    try:
        sys.exit(_main(config, _evaluation(config)))
    except StartupError as error:
        print(f"launcher: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _OF_STORAGE:
            raise
        print(f"launcher: {_storage_failed(error)}", file=sys.stderr)
        sys.exit(ExitCode.UNAVAILABLE)
    except KeyboardInterrupt:
        print(f"stopped; all processes have ended: {_continuing(config)}", file=sys.stderr)
        sys.exit(ExitCode.CLEAN if config.serve else 130)


def _storage_failed(error: OSError) -> str:
    """What the launcher itself could not write, and the cure."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return f"{what}; free some space or give back the permissions, then --resume"


def _loaded(argv: list[str]) -> LauncherConfig:
    """The settings of the command line; a mistake ends the program."""
    if not _SHOWING.intersection(argv):
        try:
            _config_file(argv)
        except ConfigError as error:
            print(f"launcher: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
    command = "seamflow serve" if "--serve" in argv else "seamflow train"
    return load_or_exit(LauncherConfig, "launcher", own_settings(argv[1:]), command)


def _continuing(config: LauncherConfig) -> str:
    """The command that goes on where Ctrl-C has stopped a run."""
    command, file = "serve" if config.serve else "train", _config_file(sys.argv)
    return f"`seamflow {command} --config {file} --name {config.name} --resume` continues it"


def _evaluation(config: LauncherConfig) -> EvaluationConfig:
    """Table [evaluation] of the same file, and --set."""
    arguments = [
        "--config",
        str(_config_file(sys.argv)),
        *flags_by_table(config.set).get(_TABLE, ()),
    ]
    return load(EvaluationConfig, _TABLE, arguments)


def _main(config: LauncherConfig, evaluation: EvaluationConfig) -> int:
    layout = make_layout(config, _config_file(sys.argv))
    plans = plan(config, layout)
    if "redis" in layout.ports:
        redis = redis_server.server_plan(config, layout.folder, layout.ports["redis"])
        plans = {"redis": redis, **plans}
    _divide_threads(plans)
    try:
        check_installed(plans.values(), _engine(config))
        _check(config, layout)
        settings = _checked_settings(config, plans)
        check_hosts(settings)
        check_same_run(config, layout)
        check_evaluation(config, evaluation, layout)
        check_program(plans)
        amount = _check_user_code(config, layout, plans)
    except StartupError:
        # The name is free again for a run that is not refused.
        if not (config.resume or config.dry_run):
            shutil.rmtree(layout.folder)
        raise
    if config.dry_run:
        return _dry_run(plans, amount, settings, config.forecast)
    model = str(Path(layout.path(config.model)).resolve())
    facts = {"run_id": layout.run_id, "model": model, "agents": config.kind_of_agents}
    facts |= {"config": str(layout.config_file), "folder": str(layout.folder)}
    facts |= layout.addresses()
    if config.has_http_gateway:
        facts["http_gateway"] = base_url(config, layout)
    note_beginning(config, layout)
    (layout.folder / "addresses.json").write_text(json.dumps(facts, indent=2))
    _link_latest(layout.folder)
    is_terminal = sys.stdout.isatty() and config.live
    metrics = layout.folder / "metrics.jsonl"
    view = LiveView(config.name, metrics) if is_terminal else PlainView(metrics)
    with recorded_end(layout.folder), view:
        if amount:
            view.note(amount)
        run = Run(config, layout, plans, view, evaluation=evaluation)
        summary = asyncio.run(run.serve() if config.serve else run.train())
    if summary is not None:
        (layout.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        show_summary(summary, layout.folder)
    return ExitCode.CLEAN


def _divide_threads(plans: Mapping[str, ProcessPlan]) -> None:
    """Set this process's own variables, which its children get."""
    changes, lines = divided_threads(os.environ, plans, num_cores())
    os.environ.update(changes)
    for line in lines:
        print(f"launcher: warning: {line}", file=sys.stderr)


def make_layout(config: LauncherConfig, config_file: Path) -> Layout:
    """The folder, ports and addresses of a run; makes and holds its folder, but for a dry run.

    Raises:
        ConfigError: there is such a run already, or none to resume, or a process has it.
    """
    folder = (Path(config.runs_folder) / config.name).resolve()
    if folder.exists() and not config.resume and not config.dry_run:
        raise ConfigError(
            f"run {config.name!r} exists in {folder}: --resume it, give --name, or delete it"
        )
    if config.resume and not folder.exists():
        raise ConfigError(f"there is no run {config.name!r} in {folder.parent} to --resume")
    if config.resume:
        _check_name(folder, config.name)
    if not config.dry_run:
        _make_folder(folder)
        run_lock.hold(folder)
    ports = free_ports(config, _agent_ports(folder / "addresses.json"))
    url = redis_server.given_url(config)
    if url is not None:
        del ports["redis"]
    elif config.dry_run:
        url = f"redis://127.0.0.1:{ports['redis']}"
    else:
        url = redis_server.private_url(folder, ports["redis"])
    return Layout(
        folder=folder,
        run_id=config.name,
        config_file=config_file.resolve(),
        ports=ports,
        redis_url=url,
        **({} if config.dry_run else {"credential_secret": _credential_secret(folder)}),
    )


def _check_name(folder: Path, name: str) -> None:
    """Refuse a folder that was renamed: all that a run has stored is under its own name."""
    began_as = _known(folder / "addresses.json").get("run_id", name)
    if began_as != name:
        own = folder.with_name(str(began_as))
        raise ConfigError(
            f"folder {str(folder)!r} holds run {began_as!r}, not {name!r}: rename it to "
            f"{str(own)!r}, then --name {began_as} --resume"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"folder {str(folder)!r} cannot be made: {error.strerror}; give --runs-folder, a "
            "folder that this user may write"
        ) from error


def _agent_ports(addresses: Path) -> dict[str, int]:
    """The ports that the agents of an earlier start of this run know; none: it is the first."""
    known = _known(addresses)
    return {name: int(known[name].rpartition(":")[2]) for name in AGENT_PORTS if known.get(name)}


def _known(addresses: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(addresses.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _credential_secret(folder: Path) -> str:
    """The run's own key, made at its first start: credentials outlive --resume."""
    file = folder / "credential_secret"
    with suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8")
    secret = secrets.token_hex(32)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(secret)
    return secret


def _config_file(arguments: list[str]) -> Path:
    """The configuration file, which all child processes read too."""
    for before, argument in itertools.pairwise(arguments):
        if before == "--config":
            return Path(argument)
    for argument in arguments:
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
    raise ConfigError(
        f"--config is not given and there is no {DEFAULT_FILE} here: name the TOML file that "
        "describes the run; `seamflow init FOLDER` writes one"
    )


def _check(config: LauncherConfig, layout: Layout) -> None:
    """Check the prerequisites before the first process starts."""
    check_groups(config, layout.config_file)
    if process_setting(config, layout.config_file, "agent_runner"):
        raise ConfigError(
            "the file has a table [agent_runner], which no process reads: give agent, "
            "concurrency and rollout_timeout in [launcher], others by --set agent_runner.NAME=VALUE"
        )
    if config.prepare is None:
        _check_model(config, Path(layout.path(config.model)))
        path = config.tasks
        if path is not None and ":" not in path and not Path(layout.path(path)).is_file():
            raise ConfigError(f"tasks {path!r} does not exist")
    parent = layout.folder if layout.folder.exists() else layout.folder.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < _MIN_FREE_BYTES:
        raise ConfigError(
            f"runs_folder {config.runs_folder!r} has {free >> 20} MiB free: a run needs at least "
            f"{_MIN_FREE_BYTES >> 20} MiB; free some, or give --runs-folder on another disk"
        )


def check_evaluation(config: LauncherConfig, evaluation: EvaluationConfig, layout: Layout) -> None:
    """Check that there is something to evaluate on; read it, unless it is still to be prepared."""
    has_tasks = evaluation.tasks or config.heldout_tasks or config.num_heldout
    if evaluation.every_steps and not has_tasks:
        raise ConfigError(
            f"evaluation.every_steps is {evaluation.every_steps}, but there are no held-out tasks: "
            "give tasks in [evaluation], or num_heldout in [launcher] for an environment's own"
        )
    tasks = evaluation.tasks or config.heldout_tasks
    if tasks is not None and not (config.prepare and "{run}" in tasks):
        fields = heldout_fields(config, evaluation, layout.config_file)
        read_tasks(layout.path(tasks), fields, config.seed)


def _check_model(config: LauncherConfig, folder: Path) -> None:
    try:
        check_model_folder(folder)
        if not config.raw_tokens:
            check_chat_template(folder)
            if (warning := warn_of_end(folder)) is not None:
                print(f"launcher: warning: {warning}", file=sys.stderr)
        if _engine(config) in (None, _EMBEDDED):
            check_attention(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _engine(config: LauncherConfig) -> object:
    return process_setting(config, _config_file(sys.argv), "rollout_server.engine")


def check_program(plans: Mapping[str, ProcessPlan]) -> None:
    """Raise `ConfigError` if the agent's program is not there."""
    agent = plans.get("agent")
    if agent is not None and shutil.which(agent.command[0], path=agent.environment["PATH"]) is None:
        raise ConfigError(
            f"agent_command starts {agent.command[0]!r}, and there is no such program: give its "
            "path, or install it"
        )


def _checked_settings(
    config: LauncherConfig, plans: Mapping[str, ProcessPlan]
) -> Mapping[str, ServerConfig]:
    """`check_settings`; warnings are shown once, in a run by its processes."""
    with redirect_stderr(StringIO()) as warnings:
        settings = check_settings(plans.values())
    if config.dry_run:
        sys.stderr.writelines(dict.fromkeys(warnings.getvalue().splitlines(keepends=True)))
    return settings


def _check_user_code(
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
    said = done.stderr.strip().removeprefix("dataloader: ")
    return said or f"loading the user's code ended with code {done.returncode}: {done.args[-1]}"


def _checked(process: ProcessPlan) -> subprocess.CompletedProcess[str]:
    assert process.check is not None
    return run_command(process.check, child_environment(process.environment))


def _dry_run(
    plans: Mapping[str, ProcessPlan],
    amount: str | None,
    settings: Mapping[str, ServerConfig],
    device: str,
) -> int:
    """Print what would be started; everything has been checked but the layers of an adapter."""
    adapters = _checked_adapters(plans, settings)
    for process in plans.values():
        print(f"{process.name:24} {' '.join(process.command)}")
    for line in (adapters, amount, "nothing was started"):
        if line:
            print(line, flush=True)
    return _forecast(device) if device else ExitCode.CLEAN


def _forecast(device: str) -> int:
    """Print the forecast of this command line's run; a process of its own has torch."""
    forecast = (sys.executable, "-m", "tools.forecast", "--device", device, *sys.argv[1:])
    return subprocess.run(forecast, check=False).returncode


def _checked_adapters(
    plans: Mapping[str, ProcessPlan], settings: Mapping[str, ServerConfig]
) -> str:
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


def _link_latest(folder: Path) -> None:
    latest = folder.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
