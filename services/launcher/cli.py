"""Entry point: `seamflow train --config my.toml`, or `python -m services.launcher`.

`seamflow serve` is the same with --serve.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from services.chassis.config.load import load, load_or_exit
from services.chassis.errors import ConfigError, ExitCode, StartupError
from services.launcher import redis_server
from services.launcher.checks.groups import check_groups
from services.launcher.checks.process_settings import process_setting
from services.launcher.checks.task_amount import amount_of_tasks
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig, flags_by_table
from services.launcher.evaluation.evaluation_config import EvaluationConfig
from services.launcher.evaluation.heldout_tasks import heldout_fields, read_tasks
from services.launcher.layout import AGENT_PORTS, Layout, free_ports
from services.launcher.process_plan import CHECK_TASKS, plan
from services.launcher.report.run_end import recorded_end
from services.launcher.report.shown_summary import show_summary
from services.launcher.run import Run
from services.launcher.supervisor import child_environment
from services.launcher.view import LiveView, PlainView
from services.lib.model_files.end_ids import warn_of_end
from services.lib.model_folder import check_chat_template, check_model_folder
from services.lib.text_config import check_attention

__all__ = ["check_evaluation", "check_program", "main", "make_layout"]

_TABLE = "evaluation"
_EMBEDDED = "torch"
_MIN_FREE_BYTES = 512 * 1024 * 1024


def main() -> NoReturn:
    """Train or serve; exits with a code of `ExitCode`, a run that Ctrl-C cut short with 130."""
    config = load_or_exit(LauncherConfig, "launcher")
    try:
        sys.exit(_main(config, _evaluation(config)))
    except StartupError as error:
        print(f"launcher: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped; all processes have ended", file=sys.stderr)
        sys.exit(ExitCode.CLEAN if config.serve else 130)


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
    try:
        _check(config, layout)
        check_evaluation(config, evaluation, layout)
        check_program(plans)
        amount = None if config.dry_run else _check_tasks(config, layout, plans)
    except StartupError:
        # The name is free again for a run that is not refused.
        if not (config.resume or config.dry_run):
            shutil.rmtree(layout.folder)
        raise
    if config.dry_run:
        return _dry_run(config, layout, plans)
    model = str(Path(layout.path(config.model)).resolve())
    facts = {"run_id": layout.run_id, "model": model, **layout.addresses()}
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


def make_layout(config: LauncherConfig, config_file: Path) -> Layout:
    """The folder, ports and addresses of a run; makes its folder unless it is a dry run."""
    folder = (Path(config.runs_folder) / config.name).resolve()
    if folder.exists() and not config.resume and not config.dry_run:
        raise ConfigError(
            f"run {config.name!r} exists in {folder}: --resume it, give --name, or delete it"
        )
    if config.resume and not folder.exists():
        raise ConfigError(f"there is no run {config.name!r} in {folder.parent} to --resume")
    if not config.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    ports = free_ports(config, _agent_ports(folder / "addresses.json"))
    url = redis_server.given_url(config)
    if url is not None:
        del ports["redis"]
    return Layout(
        folder=folder,
        run_id=config.name,
        config_file=config_file.resolve(),
        ports=ports,
        redis_url=url or f"redis://127.0.0.1:{ports['redis']}",
        **({} if config.dry_run else {"credential_secret": _credential_secret(folder)}),
    )


def _agent_ports(addresses: Path) -> dict[str, int]:
    """The ports that the agents of an earlier start of this run know; none: it is the first."""
    try:
        known = json.loads(addresses.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: int(known[name].rpartition(":")[2]) for name in AGENT_PORTS if known.get(name)}


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
    raise ConfigError("--config is not given: name the TOML file that describes the run")


def _check(config: LauncherConfig, layout: Layout) -> None:
    """Check the prerequisites before the first process starts."""
    check_groups(config, _config_file(sys.argv))
    if config.ranker and find_spec("sklearn") is None:
        raise ConfigError(
            "ranker is true, which requires scikit-learn: pip install 'seamflow[ranker]'"
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
        engine = process_setting(config, _config_file(sys.argv), "rollout_server.engine")
        if engine in (None, _EMBEDDED):
            check_attention(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_program(plans: Mapping[str, ProcessPlan]) -> None:
    """Raise `ConfigError` if the agent's program is not there."""
    agent = plans.get("agent")
    if agent is not None and shutil.which(agent.command[0], path=agent.environment["PATH"]) is None:
        raise ConfigError(
            f"agent_command starts {agent.command[0]!r}, and there is no such program: give its "
            "path, or install it"
        )


def _check_tasks(
    config: LauncherConfig, layout: Layout, plans: Mapping[str, ProcessPlan]
) -> str | None:
    """Read all tasks before anything starts; their number next to what training needs, if known.

    Raises:
        ConfigError: a row is no task; its file and line are named.
    """
    dataloader = plans.get("dataloader")
    if dataloader is None or dataloader.check is None or CHECK_TASKS not in dataloader.check:
        return None
    done = _checked(dataloader)
    if done.returncode != 0:
        raise ConfigError(done.stderr.strip().removeprefix("dataloader: "))
    return amount_of_tasks(config, layout.config_file, json.loads(done.stdout.splitlines()[-1]))


def _checked(process: ProcessPlan) -> subprocess.CompletedProcess[str]:
    assert process.check is not None
    environment = child_environment(process.environment)
    return subprocess.run(
        process.check, env=environment, check=False, capture_output=True, text=True
    )


def _dry_run(config: LauncherConfig, layout: Layout, plans: Mapping[str, ProcessPlan]) -> int:
    """Run the configuration check of every process; print the commands, errors and a verdict."""
    checked = [process for process in plans.values() if process.check is not None]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = list(threads.map(_checked, checked))
    for process in plans.values():
        print(f"{process.name:24} {' '.join(process.command)}")
    for done in results:
        sys.stderr.write(done.stderr)
    worst = max((done.returncode for done in results), default=int(ExitCode.CLEAN))
    if worst == 0:
        worst = _show_adapters(config, layout, plans)
    if worst == 0 and (amount := _check_tasks(config, layout, plans)) is not None:
        print(amount)
    print("nothing was started" if worst == 0 else "the configuration has errors", flush=True)
    return worst


def _show_adapters(config: LauncherConfig, layout: Layout, plans: Mapping[str, ProcessPlan]) -> int:
    """Print which layers get an adapter, or what is wrong with lora.targets; an exit code."""
    rank = process_setting(config, layout.config_file, "trainer.lora.rank")
    trainer = next((plan for name, plan in plans.items() if name.startswith("trainer")), None)
    if rank in (None, 0, "0") or config.prepare is not None or trainer is None:
        return ExitCode.CLEAN
    assert trainer.check is not None
    words = (
        "trainer.model.adapted_layers" if each == "trainer" else each for each in trainer.check
    )
    done = _checked(replace(trainer, check=tuple(words)[:-1]))
    sys.stderr.write(done.stderr)
    sys.stdout.write(done.stdout)
    return done.returncode


def _link_latest(folder: Path) -> None:
    latest = folder.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
