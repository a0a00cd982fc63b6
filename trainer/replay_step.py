"""`python -m trainer.replay_step FOLDER`: compute a step again, without services.

`dump_every` wrote it. A step of several ranks is replayed by as many: `torchrun --nproc-per-node N
-m trainer.replay_step FOLDER`. Prints what came of it then and now, and ends with 1
if a number differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint.step_dump import Dump, read_dump
from trainer.policy.commands import Exit, Load, Optimize
from trainer.ranks.command_channel import Leader, follow, join
from trainer.ranks.worker import Worker

__all__ = ["main", "replayed"]

_GRACE_SECONDS = 5.0


def main() -> None:
    """Replay, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="checkpoint_folder/dumps/step_...")
    dump = _read(parser.parse_args().folder)
    ranks = join(dump.config)
    if ranks.world_size != dump.world_size:
        sys.exit(f"the step is of {dump.world_size} ranks: start as many, with torchrun")
    worker = Worker(dump.config)
    if ranks.rank:
        follow(ranks, worker, _GRACE_SECONDS)
        return
    leader = Leader(ranks, worker)
    numbers = replayed(dump, leader)
    leader.do(Exit())
    if not _told(dump, numbers):
        sys.exit(1)


def replayed(dump: Dump, leader: Leader) -> dict[str, float]:
    """What the step gives now."""
    leader.do(Load(folder=str(dump.folder)))
    for commands in dump.parts():
        leader.do_each(commands)
    return leader.do(Optimize(step=dump.step))[0]


def _read(folder: Path) -> Dump:
    try:
        return read_dump(folder)
    except ValueError as error:
        sys.exit(str(error))


def _told(dump: Dump, numbers: Mapping[str, float]) -> bool:
    """Print both; whether they are equal."""
    print(f"{f'step {dump.step}':32} {'recorded':>24} {'replayed':>24}")
    for name in sorted(dump.numbers.keys() | numbers.keys()):
        then, now = dump.numbers.get(name), numbers.get(name)
        print(f"{name:32} {then!s:>24} {now!s:>24}{'' if then == now else '  differs'}")
    return dump.numbers == numbers


if __name__ == "__main__":
    main()
