"""`seamflow slurm --config FILE`: write the batch script of a run, for sbatch."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from services.chassis.config.load import exiting, load
from services.chassis.errors import ConfigError, ExitCode
from services.launcher.config import DEFAULT_FILE, LauncherConfig, own_settings
from services.launcher.node_plan import node_plan
from services.lib.model_files.weight_headers import read_headers

_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
_SIGNAL_SECONDS, _WRITTEN_PER_SECOND = 120, 0.5e9
_WORD = re.compile(r"[\w.,+-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What the script asks Slurm for."""

    num_nodes: int
    """Machines of the job, which are the run's hosts."""
    gpus_per_node: int = 0
    """GPUs of each; 0: none is asked for."""
    time: str = ""
    """Longest time, as sbatch reads it; empty: the partition's."""
    partition: str = ""
    account: str = ""
    container: str = ""
    """Image for srun --container-image (pyxis)."""
    venv: Path | None = None
    """Folder of the virtual environment; None: `seamflow` is on the PATH of the job."""
    signal_seconds: int = 120
    """How long before its end the job gets a signal, so that it can write a checkpoint."""
    directives: Mapping[str, str] = field(default_factory=dict)
    """Further ones of sbatch, or others in place of the script's own, such as {"qos": "long"}."""
    setup: Path | None = None
    """Shell file that is read first; None: there is none."""


def checked_job(job: SlurmJob, config: LauncherConfig) -> SlurmJob:
    """The job, if it has what the nodes of the run need.

    Raises:
        ConfigError: names flag, value and cure.
    """
    if job.num_nodes != len(config.hosts):
        raise ConfigError(
            f"--nodes is {job.num_nodes}, and nodes of [launcher] are on {len(config.hosts)} "
            "hosts: a job has one machine for each host"
        )
    highest = max((gpu for node in config.node_plans() for gpu in node.gpus), default=-1)
    if highest >= job.gpus_per_node:
        raise ConfigError(
            f"--gpus-per-node is {job.gpus_per_node}, and nodes of [launcher] have GPU {highest}: "
            f"give at least {highest + 1}"
        )
    if job.time and not _TIME.fullmatch(job.time):
        raise ConfigError(f"--time is {job.time!r}: write it as 90, 4:00:00 or 2-12:00:00")
    for name in ("partition", "account"):
        if (value := getattr(job, name)) and not _WORD.fullmatch(value):
            raise ConfigError(f"--{name} is {value!r}: give a name of this cluster")
    if job.container and job.venv:
        raise ConfigError(
            f"--container is {job.container!r} and --venv is {str(job.venv)!r}: give one"
        )
    for name, value in job.directives.items():
        if not re.fullmatch(r"[a-z][a-z-]*", name) or not value.isprintable():
            raise ConfigError(f"--sbatch is '{name}={value}': write it as qos=long or exclusive")
    if job.setup is not None and not job.setup.is_file():
        raise ConfigError(f"--setup {str(job.setup)!r} does not exist: name a shell file")
    if job.signal_seconds < 1:
        raise ConfigError(f"--signal-seconds is {job.signal_seconds}: give a second or more")
    return job


def batch_script(
    job: SlurmJob, config: LauncherConfig, file: Path, settings: tuple[str, ...] = ()
) -> str:
    """The script for sbatch.

    Args:
        job: what it asks for.
        config: of the run.
        file: its configuration, which all nodes must see.
        settings: further flags of `seamflow train`.
    """
    values = {
        "NAME": config.name,
        "FOLDER": str(Path.cwd()),
        "CONFIG": str(file.resolve()),
        "RUN": str((Path(config.runs_folder) / config.name).resolve()),
        "SEAMFLOW": "seamflow" if job.venv is None else str(job.venv.resolve() / "bin/seamflow"),
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{line}" for line in _directives(job, config)),
        "",
        *([f"source {shlex.quote(str(job.setup.resolve()))} || exit 78"] if job.setup else []),
        "# Folder, configuration and run lie on a file system that all nodes of the job share.",
        *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
        f"SETTINGS=({shlex.join(settings)})",
        f"STEP=({shlex.join(_step(job, values))})",
        _BODY,
    ]
    return "\n".join(lines)


def _directives(job: SlurmJob, config: LauncherConfig) -> Iterator[str]:
    for line in _own_directives(job, config):
        if line.partition("=")[0] not in job.directives:
            yield line
    yield from (f"{name}={value}" if value else name for name, value in job.directives.items())


def _own_directives(job: SlurmJob, config: LauncherConfig) -> Iterator[str]:
    yield f"job-name={config.name}"
    yield f"nodes={job.num_nodes}"
    yield "ntasks-per-node=1"
    # The launcher counts the GPUs of whole machines.
    yield "exclusive"
    yield "mem=0"
    if job.gpus_per_node:
        yield f"gpus-per-node={job.gpus_per_node}"
    for name in ("time", "partition", "account"):
        if value := getattr(job, name):
            yield f"{name}={value}"
    yield "requeue"
    yield "open-mode=append"
    yield f"output={config.name}-%j.log"
    # To this script alone: processes would take USR1 for their end.
    yield f"signal=B:USR1@{job.signal_seconds}"


def _step(job: SlurmJob, values: Mapping[str, str]) -> tuple[str, ...]:
    """How a command starts on a node: it may use all of the node."""
    folder = values["FOLDER"]
    step = ("srun", "--nodes=1", "--ntasks=1", "--cpu-bind=none", f"--chdir={folder}")
    if not job.container:
        return step
    # At the same paths, as host 0 names them to the others.
    needed = (folder, *(str(Path(values[name]).parent) for name in ("CONFIG", "RUN")))
    mounts = ",".join(f"{each}:{each}" for each in dict.fromkeys(needed))
    image, inside = f"--container-image={job.container}", f"--container-workdir={folder}"
    return (*step, image, f"--container-mounts={mounts}", inside)


_BODY = """
cd "$FOLDER" && mkdir -p "$(dirname "$RUN")" || exit 78
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
PORT=$((20000 + SLURM_JOB_ID % 10000))
LIST=()
if ((${#HOSTS[@]} > 1)); then
    LIST=(--hosts "$(IFS=,; echo "${HOSTS[*]}")" --join-port "$PORT")
fi

# A run of this name goes on, such as one whose job was requeued.
RESUME=()
if [ -e "$RUN/began_with.json" ]; then RESUME=(--resume); fi

"${STEP[@]}" --nodelist="${HOSTS[0]}" \\
    "$SEAMFLOW" train --config "$CONFIG" "${SETTINGS[@]}" "${LIST[@]}" "${RESUME[@]}" &
TRAIN=$!
for ((i = 1; i < ${#HOSTS[@]}; i++)); do
    "${STEP[@]}" --nodelist="${HOSTS[i]}" --open-mode=append --output="$NAME-%j-host-$i.log" \\
        "$SEAMFLOW" join "${HOSTS[0]}:$PORT" --host "$i" --secret-file "$RUN/hosts/join_secret" &
done

# Before the time is over, or when another job takes the nodes: write a checkpoint, then requeue.
requeue() {
    echo "job $SLURM_JOB_ID: received its signal; writing a checkpoint"
    "${STEP[@]}" --overlap --nodelist="${HOSTS[0]}" \\
        "$SEAMFLOW" save-checkpoint --run-folder "$RUN" ||
        echo "no checkpoint was written: the run goes on from the one before"
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1

# A signal interrupts `wait`.
CODE=1
while kill -0 "$TRAIN" 2>/dev/null; do
    wait "$TRAIN"
    CODE=$?
done
# The other hosts have received the end of the run.
kill $(jobs -p) 2>/dev/null
exit "$CODE"
"""


def main() -> NoReturn:
    """Print the script, or write it to --out; exits with a code of `ExitCode`."""
    given, others = _parser().parse_known_args()
    with exiting("slurm"):
        script = script_of(given, others)
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
        signal_seconds=_signal_seconds(Path(config.model))
        if given.signal_seconds is None
        else given.signal_seconds,
        directives=dict(text.partition("=")[::2] for text in given.sbatch),
        setup=given.setup,
    )
    return batch_script(checked_job(job, config), config, given.config, tuple(others))


def _signal_seconds(model: Path) -> int:
    """120, and what a checkpoint takes to be written: 12 bytes a parameter, at 0.5 GB/s."""
    with suppress(ValueError):  # the model is not on this machine, or will be prepared
        sizes = (math.prod(each.shape) for each in read_headers(model).values())
        return _SIGNAL_SECONDS + math.ceil(12 * sum(sizes) / _WRITTEN_PER_SECOND)
    return _SIGNAL_SECONDS


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
        "--sbatch",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a directive of sbatch, such as qos=long, constraint=a100 or gpus-per-node=h100:8",
    )
    parser.add_argument("--setup", type=Path, help="shell file read first: modules, NCCL_*")
    parser.add_argument(
        "--signal-seconds",
        type=int,
        help="for the checkpoint before the end (120, and 24 for each billion of parameters)",
    )
    return parser


if __name__ == "__main__":
    main()
