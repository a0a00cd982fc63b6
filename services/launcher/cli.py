"""Entry point: `seamflow train --config my.toml`, or `python -m services.launcher`."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from services.chassis.config.load import load_or_exit
from services.chassis.errors import ConfigError, ExitCode, StartupError
from services.launcher import redis_server
from services.launcher.config import LauncherConfig
from services.launcher.process_plan import Layout, ProcessPlan, free_ports, plan
from services.launcher.run import Run
from services.launcher.view import LiveView, PlainView

__all__ = ["main"]

_MIN_FREE_BYTES = 512 * 1024 * 1024


def main() -> NoReturn:
    """Train, and exit with a code of `ExitCode`, or 130 after Ctrl-C."""
    config = load_or_exit(LauncherConfig, "launcher")
    try:
        sys.exit(_main(config))
    except StartupError as error:
        print(f"launcher: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped; all processes have ended", file=sys.stderr)
        sys.exit(130)


def _main(config: LauncherConfig) -> int:
    layout = _layout(config, _config_file(sys.argv))
    plans = plan(config, layout)
    if "redis" in layout.ports:
        redis = redis_server.server_plan(config, layout.folder, layout.ports["redis"])
        plans = {"redis": redis, **plans}
    _check(config, layout)
    if config.dry_run:
        return _dry_run(plans)
    (layout.folder / "addresses.json").write_text(
        json.dumps({"run_id": layout.run_id, **layout.addresses()}, indent=2)
    )
    _link_latest(layout.folder)
    summary = _train(config, layout, plans)
    (layout.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _show(summary, layout.folder)
    return ExitCode.CLEAN


def _train(config: LauncherConfig, layout: Layout, plans: dict[str, ProcessPlan]) -> dict[str, Any]:
    is_terminal = sys.stdout.isatty() and config.live
    metrics_file = layout.folder / "metrics.jsonl"
    view = LiveView(config.name, metrics_file) if is_terminal else PlainView()
    with view:
        return asyncio.run(Run(config, layout, plans, view).train())


def _layout(config: LauncherConfig, config_file: Path) -> Layout:
    folder = (Path(config.runs_folder) / config.name).resolve()
    if folder.exists() and not config.resume and not config.dry_run:
        raise ConfigError(f"run {config.name!r} exists in {folder}: --resume it, or give --name")
    if config.resume and not folder.exists():
        raise ConfigError(f"there is no run {config.name!r} in {folder.parent} to --resume")
    if not config.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    ports, url = free_ports(config), redis_server.given_url(config)
    if url is not None:
        del ports["redis"]
    return Layout(
        folder=folder,
        run_id=config.name,
        config_file=config_file.resolve(),
        ports=ports,
        redis_url=url or f"redis://127.0.0.1:{ports['redis']}",
    )


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
    if config.ranker and find_spec("sklearn") is None:
        raise ConfigError(
            "ranker is true, which requires scikit-learn: pip install 'seamflow[ranker]'"
        )
    if config.prepare is None:
        model = Path(layout.path(config.model))
        if not (model / "config.json").is_file():
            raise ConfigError(
                f"model {str(model)!r} is not a Hugging Face folder: it has no config.json"
            )
        for name in ("tasks", "heldout_tasks"):
            path = getattr(config, name)
            if path is not None and ":" not in path and not Path(layout.path(path)).is_file():
                raise ConfigError(f"{name} {path!r} does not exist")
    parent = layout.folder if layout.folder.exists() else layout.folder.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < _MIN_FREE_BYTES:
        raise ConfigError(
            f"runs_folder {config.runs_folder!r} has {free >> 20} MiB free: a run needs at least "
            f"{_MIN_FREE_BYTES >> 20} MiB; free some, or give --runs-folder on another disk"
        )


def _dry_run(plans: Mapping[str, ProcessPlan]) -> int:
    """Run the configuration check of every process, and print the commands."""
    from services.launcher.supervisor import child_environment

    worst = int(ExitCode.CLEAN)
    for process in plans.values():
        print(f"{process.name:24} {' '.join(process.command)}")
        if process.check is not None:
            environment = child_environment(process.environment)
            worst = max(
                worst, subprocess.run(process.check, env=environment, check=False).returncode
            )
    print("nothing was started" if worst == 0 else "the configuration has errors", flush=True)
    return worst


def _link_latest(folder: Path) -> None:
    latest = folder.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)


def _show(summary: Mapping[str, Any], folder: Path) -> None:
    table = Table(title=f"run {summary['run']}", show_header=False)
    for name, value in summary.items():
        if value not in (None, "") and not isinstance(value, dict):
            shown = (
                f"{value:.1%}"
                if name.startswith("heldout_") and isinstance(value, float)
                else value
            )
            table.add_row(name, str(shown))
    console = Console()
    console.print(table)
    if summary["nodes"]:
        console.print(_nodes(summary["nodes"]))
    console.print(f"summary, pictures and logs: {folder}")


def _nodes(nodes: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per node: shares of its time during training, and mean seconds of its switches."""
    activities = sorted({name for node in nodes.values() for name in node} - {"switch_seconds"})
    tags = sorted({tag for node in nodes.values() for tag in node["switch_seconds"]})
    table = Table(title="nodes during training")
    for column in (
        "node",
        *activities,
        *(f"switch to {tag or 'none'}, s" for tag in tags),
    ):
        table.add_column(column, justify="left" if column == "node" else "right")
    for name, node in nodes.items():
        seconds = (node["switch_seconds"].get(tag) for tag in tags)
        table.add_row(
            name,
            *(f"{node.get(activity, 0.0):.1%}" for activity in activities),
            *("–" if each is None else f"{each:.3f}" for each in seconds),
        )
    return table
