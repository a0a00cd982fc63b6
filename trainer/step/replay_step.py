"""`python -m trainer.step.replay_step FOLDER`: compute a dumped step again, without services.

A step of several ranks is replayed by the same number of ranks: `torchrun --nproc-per-node N -m
trainer.step.replay_step FOLDER`. Prints the recorded and the replayed metrics, and exits with 1 if
any differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.config import GangConfig
from trainer.ranks.command_channel import Rank0, worker_loop
from trainer.ranks.commands import Exit, Load, Optimize
from trainer.ranks.end_process import end_process
from trainer.ranks.process_group import join
from trainer.ranks.worker import Worker
from trainer.step.step_dump import StepDump, read_dump

__all__ = ["main", "replay"]

_GRACE_SECONDS = 5.0


def main() -> None:
    """Replay the step of the command line and compare its metrics."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="checkpoint_folder/dumps/step_...")
    dump = _read(parser.parse_args().folder)
    # All ranks of the replay are here, wherever those of the step were.
    ranks = join(dump.config.replace(gang=GangConfig()))
    if ranks.world_size != dump.world_size:
        sys.exit(f"the step has {dump.world_size} ranks: start {dump.world_size} with torchrun")
    worker = Worker(dump.config, ranks.store)
    if ranks.rank:
        worker_loop(ranks, worker, _GRACE_SECONDS)
        end_process(0)
    rank0 = Rank0(ranks, worker)
    metrics = replay(dump, rank0)
    rank0.do(Exit())
    end_process(0 if _print_comparison(dump, metrics) else 1)


def replay(dump: StepDump, rank0: Rank0) -> dict[str, float]:
    """Compute the step again; its metrics."""
    rank0.do(Load(folder=str(dump.folder)))
    for commands in dump.chunks():
        rank0.do_each(commands)
    return rank0.do(Optimize(step=dump.step))[0]


def _read(folder: Path) -> StepDump:
    try:
        return read_dump(folder)
    except ValueError as error:
        sys.exit(str(error))


def _print_comparison(dump: StepDump, metrics: Mapping[str, float]) -> bool:
    """Print recorded and replayed metrics; whether they are equal."""
    print(f"{f'step {dump.step}':32} {'recorded':>24} {'replayed':>24}")
    for name in sorted(dump.metrics.keys() | metrics.keys()):
        then, now = dump.metrics.get(name), metrics.get(name)
        print(f"{name:32} {then!s:>24} {now!s:>24}{'' if then == now else '  differs'}")
    return dump.metrics == metrics


if __name__ == "__main__":
    main()
