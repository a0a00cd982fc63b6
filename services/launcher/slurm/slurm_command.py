"""`seamflow slurm --config FILE`: write the batch script of a run, for sbatch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from services.chassis.config.load import load
from services.chassis.errors import ConfigError, ExitCode, StartupError
from services.launcher.config import LauncherConfig
from services.launcher.node_plan import node_plan
from services.launcher.set_option import DEFAULT_FILE, own_settings
from services.launcher.slurm.batch_script import SlurmJob, batch_script, checked_job


def main() -> NoReturn:
    """Print the script, or write it to --out; exits with a code of `ExitCode`."""
    given, others = _parser().parse_known_args()
    try:
        script = script_of(given, others)
    except StartupError as error:
        print(f"slurm: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    warnings = [*_warnings(given, others)]
    for line in warnings:
        print(f"slurm: warning: {line}", file=sys.stderr)
    if given.out is None:
        sys.stdout.write(script)
    else:
        given.out.write_text(script, encoding="utf-8")
        print(f"{'mend this, then ' if warnings else ''}submit it: sbatch {given.out}")
    sys.exit(ExitCode.CLEAN)


def _warnings(given: argparse.Namespace, others: Sequence[str]) -> Iterator[str]:
    """What would end the job, as far as this machine has what its machines have."""
    if given.venv is not None and not (given.venv / "bin" / "seamflow").is_file():
        yield f"--venv is {str(given.venv)!r}, which has no bin/seamflow: name a folder that has it"
    arguments = ["--config", str(given.config), *others]
    hosts = _placeholders(["--config", str(given.config), *own_settings(others)], "127.0.0.{}")
    command = (sys.executable, "-m", "services.launcher", *arguments, *hosts, "--dry-run")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield from (line.removeprefix("launcher: ") for line in done.stderr.splitlines())


def script_of(given: argparse.Namespace, others: Sequence[str]) -> str:
    """The script of a command line; `others` are settings of [launcher], for `seamflow train`.

    Raises:
        StartupError: a wrong value; the message names flag, value and cure.
    """
    if not given.config.is_file():
        raise ConfigError(f"--config {str(given.config)!r} does not exist: name the file of a run")
    arguments = ["--config", str(given.config), *own_settings(others)]
    config = load(LauncherConfig, "launcher", [*arguments, *_placeholders(arguments)])
    highest = max((gpu for node in config.node_plans() for gpu in node.gpus), default=-1)
    job = SlurmJob(
        num_nodes=len(config.hosts) if given.nodes is None else given.nodes,
        gpus_per_node=highest + 1 if given.gpus_per_node is None else given.gpus_per_node,
        time=given.time,
        partition=given.partition,
        account=given.account,
        container=given.container,
        venv=given.venv,
        signal_seconds=given.signal_seconds,
    )
    return batch_script(checked_job(job, config), config, given.config, tuple(others))


def _placeholders(arguments: list[str], form: str = "host-{}") -> list[str]:
    """Hosts that stand for those of the job, as many as nodes are on."""
    probe = load(_AnyHosts, "launcher", arguments)
    number = 1 + max((node_plan(text).host for text in probe.nodes), default=0)
    return ["--hosts", ",".join(form.format(index + 1) for index in range(number))]


class _AnyHosts(LauncherConfig):
    """The settings, before the job's hosts are known."""

    def _check_hosts(self) -> None:
        """Not yet."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seamflow slurm",
        description="Write the sbatch script of a run: host 0 trains, the other nodes join.",
        epilog="Other flags are settings of [launcher], such as --name or --set TABLE.NAME=VALUE.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, default=Path(DEFAULT_FILE), help="of the run")
    parser.add_argument("--out", type=Path, help="file for the script; else it is printed")
    parser.add_argument("--nodes", type=int, help="machines (those that the file's nodes are on)")
    parser.add_argument("--gpus-per-node", type=int, help="(as many as the file's nodes name)")
    parser.add_argument("--time", default="", help="longest time, such as 2-00:00:00")
    parser.add_argument("--partition", default="", help="of the cluster")
    parser.add_argument("--account", default="", help="that the job is charged to")
    parser.add_argument("--container", default="", help="image for srun --container-image")
    parser.add_argument("--venv", type=Path, help="virtual environment with seamflow")
    parser.add_argument(
        "--signal-seconds", type=int, default=120, help="for the checkpoint before the end (120)"
    )
    return parser


if __name__ == "__main__":
    main()
