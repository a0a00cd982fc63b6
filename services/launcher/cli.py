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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from seamflow.inspect.lives import recorded_life
from seamflow.inspect.run_files import json_object
from seamflow.installation import missing_packages

from services.chassis.config.load import load, load_or_exit
from services.chassis.config.settings import ServerConfig
from services.chassis.config.sources import nearest
from services.chassis.errors import ConfigError, ExitCode, StartupError
from services.launcher import redis_server
from services.launcher.checks.prerequisites import (
    check_chosen,
    check_evaluation,
    check_hosts,
    check_installed,
    check_ports,
    check_prerequisites,
    check_program,
    engine_of,
)
from services.launcher.checks.run_settings import (
    check_reward_names,
    divided_threads,
    num_cores,
)
from services.launcher.checks.user_code import (
    check_user_code,
    checked_models,
    checked_settings,
    with_task_fields,
)
from services.launcher.child_process import ProcessPlan
from services.launcher.config import (
    DEFAULT_FILE,
    LauncherConfig,
    flags_by_table,
    own_settings,
    with_file,
)
from services.launcher.hosts.other_hosts import OtherHosts, host_variables
from services.launcher.hosts.run_certificates import hosts_folder, listening_at, secured
from services.launcher.layout import (
    AGENT_PORTS,
    LOOPBACK,
    Layout,
    base_url,
    free_ports,
    host_addresses,
    places,
)
from services.launcher.process_plan import plan
from services.launcher.report.output import survive_closed_output
from services.launcher.report.summary import show_summary
from services.launcher.report.view import LiveView, View
from services.launcher.run import Run
from services.launcher.same_run import FILE as BEGINNING_FILE
from services.launcher.same_run import check_same_run, hold, holder_of, note_beginning
from services.lib.evaluation import EvaluationConfig

_TABLE = "evaluation"
_OF_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
_SHOWING = frozenset({"-h", "--help", "--version", "--print-config", "--check-config"})
"""Flags that need no file."""


def main() -> NoReturn:
    """Train or serve; exits with a code of `ExitCode`, a run that Ctrl-C cut short with 130."""
    survive_closed_output()
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
    plans = plan(config, layout, evaluation)
    if missing_packages("console"):
        plans.pop("console", None)  # a run does without
    if "redis" in layout.ports:
        redis = redis_server.server_plan(config, layout.folder, layout.ports["redis"])
        plans = {"redis": redis, **plans}
    _divide_threads({name: each for name, each in plans.items() if not each.host})
    try:
        if config.has_other_hosts and not config.dry_run:
            config, plans = secured(config, layout, plans)
            os.environ.update(host_variables(layout.hosts[0], layout.hosts))
        check_installed(plans.values(), engine_of(config, layout))
        check_prerequisites(config, layout)
        settings = checked_settings(config, plans)
        _warn(check_reward_names(config, settings))
        check_chosen(settings)
        check_hosts(settings, _addresses(config, layout, plans))
        check_ports({name: each for name, each in settings.items() if not plans[name].host})
        plans = with_task_fields(plans, settings)
        check_same_run(config, layout)
        check_evaluation(config, evaluation)
        check_program(plans)
        amount = check_user_code(config, layout, plans)
    except StartupError:
        # The name is free again for a run that is not refused.
        if not (config.resume or config.dry_run):
            shutil.rmtree(layout.folder)
        raise
    if config.dry_run:
        return _dry_run(plans, amount, settings, config.forecast)
    note_beginning(config, layout)
    _write_addresses(config, layout, plans)
    _link_latest(layout.folder)
    is_terminal = sys.stdout.isatty() and config.live
    metrics = layout.folder / "metrics.jsonl"
    view = LiveView(config.name, metrics) if is_terminal else View(metrics)
    with recorded_life(layout.folder), view:
        if amount:
            view.note(amount)
        hosts = OtherHosts(config, layout, plans, view) if config.has_other_hosts else None
        accepts = any(getattr(each, "accept_lost_samples", False) for each in settings.values())
        run = Run(
            *(config, layout, plans, view),
            evaluation=evaluation,
            other_hosts=hosts,
            accepts_lost_samples=accepts,
        )
        summary = asyncio.run(run.serve() if config.serve else run.train())
    if summary is not None:
        (layout.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        show_summary(summary, layout.folder)
    return ExitCode.CLEAN


def _write_addresses(
    config: LauncherConfig, layout: Layout, plans: Mapping[str, ProcessPlan]
) -> None:
    """What other programs of this machine need to find the run."""
    model = str(Path(layout.path(config.model)).resolve())
    facts: dict[str, object] = {"run_id": layout.run_id, "model": model}
    facts["agents"] = config.kind_of_agents
    facts |= {"config": str(layout.config_file), "folder": str(layout.folder)}
    facts |= {name: each for name, each in layout.addresses().items() if _is_used(name, plans)}
    if zones := {layout.hosts[n.host]: n.zone for n in config.node_plans() if n.zone}:
        facts["zones"] = zones
    if config.has_other_hosts:
        facts["credentials"] = str(hosts_folder(layout) / "0" / "operator")
    if config.has_http_gateway:
        facts["http_gateway"] = base_url(config, layout)
    (layout.folder / "addresses.json").write_text(json.dumps(facts, indent=2))


def _addresses(
    config: LauncherConfig, layout: Layout, plans: Mapping[str, ProcessPlan]
) -> dict[str, str]:
    """On which address each process has to listen; a dry run makes no certificates for others."""
    if config.dry_run:
        return dict.fromkeys(plans, LOOPBACK)
    return {name: listening_at(each, layout) for name, each in plans.items()}


def _divide_threads(plans: Mapping[str, ProcessPlan]) -> None:
    """Set this process's own variables, which its children get."""
    changes, lines = divided_threads(os.environ, plans, num_cores())
    os.environ.update(changes)
    _warn(lines)


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"launcher: warning: {line}", file=sys.stderr)


def make_layout(config: LauncherConfig, config_file: Path) -> Layout:
    """The folder, ports and addresses of a run; makes and holds its folder, but for a dry run.

    Raises:
        ConfigError: there is such a run already, or none to resume, or a process has it.
    """
    folder = (Path(config.runs_folder) / config.name).resolve()
    if folder.exists() and not config.resume and not config.dry_run:
        holder = holder_of(folder)
        state = f"is in use by {holder}" if holder else f"exists in {folder}"
        cures = "end that process, or give" if holder else "--resume it, delete it, or give"
        raise ConfigError(f"run {config.name!r} {state}: {cures} this run another --name")
    if config.resume and not folder.exists():
        runs = [each.parent.name for each in folder.parent.glob(f"*/{BEGINNING_FILE}")]
        raise ConfigError(
            f"there is no run {config.name!r} in {folder.parent} to --resume"
            f"{nearest(config.name, runs)}"
        )
    if config.resume:
        _check_name(folder, config.name)
        if not config.dry_run:
            hold(folder)
    ports = free_ports(config, _agent_ports(folder / "addresses.json"))
    if not (config.resume or config.dry_run):
        _make_folder(folder)
        hold(folder)
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
        hosts=host_addresses(config),
        places=places(config),
        **({} if config.dry_run else _secrets(folder)),
    )


def _check_name(folder: Path, name: str) -> None:
    """Refuse a folder that was renamed: all that a run has stored is under its own name."""
    began_as = json_object(folder / "addresses.json").get("run_id", name)
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
    known = json_object(addresses)
    return {name: int(known[name].rpartition(":")[2]) for name in AGENT_PORTS if known.get(name)}


def _secrets(folder: Path) -> dict[str, str]:
    """The run's own, made at its first start: credentials and links outlive --resume."""
    return {name: _kept_secret(folder / name) for name in ("credential_secret", "console_token")}


def _kept_secret(file: Path) -> str:
    """For this user alone, and made if it is not there."""
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


def _is_used(name: str, plans: Mapping[str, ProcessPlan]) -> bool:
    """Whether a process of the run listens there: a run may have no evaluator, or console."""
    return name not in ("evaluator", "console") or name in plans


def _dry_run(
    plans: Mapping[str, ProcessPlan],
    amount: str | None,
    settings: Mapping[str, ServerConfig],
    device: str,
) -> int:
    """Print what would be started; everything has been checked but what small models show."""
    lines = checked_models(plans, settings)
    for process in plans.values():
        host = f"host {process.host}: " if process.host else ""
        print(f"{host + process.name:24} {' '.join(process.command)}")
    for line in (*lines, amount, "nothing was started"):
        if line:
            print(line, flush=True)
    return _forecast(device) if device else ExitCode.CLEAN


def _forecast(device: str) -> int:
    """Print the forecast of this command line's run; a process of its own has torch."""
    forecast = (sys.executable, "-m", "tools.plan", "--device", device, *sys.argv[1:])
    return subprocess.run(forecast, check=False).returncode


def _link_latest(folder: Path) -> None:
    latest = folder.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
