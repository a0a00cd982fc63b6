"""`make bench-train`: whole training runs compared with TRL's `GRPOTrainer`, on two cores.

Tokens per second on two workloads; with `--learn` seconds to a target on the quickstart's task
instead. Without `--peers all` only our side runs, and nothing is written.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.baselines.environments import installed, interpreter
from bench.report import MIN_SAMPLES, RESULTS, Report
from bench.train import learning, pictures, throughput
from bench.train.throughput import MIN_ROUNDS, OURS, TRL, WORKLOADS
from bench.train.trl import PEER

MODES = ("colocated", "disaggregated", "multiplexed")
CORES = 2


def main() -> None:
    """Measure, and report."""
    arguments = _arguments()
    _take_cores()
    with_trl = arguments.peers == "all"
    if with_trl:
        interpreter(PEER)  # made now, and not within the first turn
    if arguments.learn:
        _learn(arguments, with_trl)
    else:
        _throughput(arguments, with_trl)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", choices=("default", "all"), default="default")
    parser.add_argument("--mode", choices=MODES, default="disaggregated")
    parser.add_argument("--rounds", type=int, default=MIN_SAMPLES)
    parser.add_argument("--steps", type=int, default=20, help="that count, of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of --learn")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 4e-4, 8e-4])
    parser.add_argument("--learn-steps", type=int, default=80)
    arguments = parser.parse_args()
    # Found out now, and not after an hour.
    if arguments.peers == "all" and arguments.rounds < MIN_ROUNDS:
        parser.error(f"--rounds {arguments.rounds}: give at least {MIN_ROUNDS} to compare")
    if arguments.peers == "all" and len(arguments.seeds) < learning.MIN_SEEDS:
        parser.error(f"--seeds {arguments.seeds}: give at least {learning.MIN_SEEDS} to compare")
    return arguments


def _take_cores() -> None:
    """What is started from here on, of either side, may use these cores and no other."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise SystemExit(f"this machine lends {len(cores)} core: the comparison is on {CORES}")
    os.sched_setaffinity(0, cores)
    ours = ", ".join(f"{name} {throughput.threads(name)}" for name in ("trainer", "rollout_server"))
    print(f"cores {cores}; torch threads: TRL {CORES} in its one process; seamflow {ours}")


def _throughput(arguments: argparse.Namespace, with_trl: bool) -> None:
    options = throughput.Options(
        with_trl=with_trl,
        rounds=arguments.rounds,
        steps=arguments.steps,
        mode=arguments.mode,
        cores=CORES,
        seed=arguments.seed,
    )
    with _progress(options.rounds * len(WORKLOADS) * (1 + with_trl)) as report:
        raw = throughput.measure(options, report)
    figures = throughput.figures(raw, options.rounds) | {"steps_of_a_run": float(options.steps)}
    if not with_trl:
        Report(bench="train", figures=figures).show()
        return
    seeds = [options.seed + turn for turn in range(options.rounds)]
    _report("train", figures, raw, seeds)
    speeds = {
        f"at most {most} new tokens": {
            side: raw[f"max{most}.{side}.tokens_per_second"] for side in (OURS, TRL)
        }
        for most in WORKLOADS
    }
    pictures.draw_speeds(RESULTS / "train.png", speeds, options.rounds)


def _learn(arguments: argparse.Namespace, with_trl: bool) -> None:
    options = learning.Options(
        with_trl=with_trl,
        seeds=arguments.seeds,
        rates=arguments.rates,
        steps=arguments.learn_steps,
        mode=arguments.mode,
        cores=CORES,
    )
    with _progress(len(options.seeds) * len(options.rates) * (1 + with_trl)) as report:
        runs = learning.measure(options, report)
    figures = learning.figures(runs)
    if not with_trl:
        Report(bench="train_learning", figures=figures).show()
        return
    _report("train_learning", figures, learning.raw(runs), options.seeds)
    best = {side: learning.best_rate(of_side) for side, of_side in runs.items()}
    drawn = {f"{side}, {rate:g}": runs[side][rate] for side, rate in best.items()}
    title = "The quickstart's task, each side at its best learning rate"
    pictures.draw_learning(RESULTS / "train_learning.png", drawn, title)


def _report(
    bench: str, figures: dict[str, float], raw: dict[str, list[float]], seeds: Sequence[int]
) -> None:
    versions = installed(interpreter(PEER), "trl", "torch", "transformers", "accelerate")
    peers = {PEER: versions}
    Report(bench=bench, figures=figures, raw=raw, seeds=seeds, peers=peers).publish()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


if __name__ == "__main__":
    main()
