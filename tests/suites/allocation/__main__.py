"""`make test-allocation`: nodes move between training and generation while a training job goes on.

The real launcher, scheduler, node agents, rollout servers and a trainer of two nodes under
torchrun; engines are fake, so that generation takes what its agents take, and training takes an
EMULATED time for each row. The operator lets one copy train and two again; then episodes become
slow, and the scheduler takes a node for generation by what it measures. Then the scheduler, a node
agent and ranks are killed within moves. At the end each token that agents received and each sample
that was trained is looked for. In a second job training is slow, and the scheduler gives it a node
that the operator took; its steps are long, as rollout servers report means of 5 s.

Control: within bounds that allow one number of nodes alone, slow episodes let nothing move.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from seamflow.errors import UnavailableError

from bench.report import RESULTS, Report
from tests.suites.allocation.running_job import RunningJob, conserved, running_job
from tools.provenance import ROOT

_SLOWER = 6
"""Times that a slow episode takes what a step took, whatever this machine is busy with."""
_LONG_ROW_SECONDS = 1.2
"""Of training that is slower than generation."""
_CONTROL_SECONDS = 6.0
"""Of a slow episode where nothing may move."""
_LATEST_KILL = 0.5
"""Seconds after the order to move."""
_TARGET = re.compile(r"-> (\d+) training nodes")
_VICTIMS: Mapping[str, list[tuple[str, ...]]] = {
    "scheduler": [("-m", "scheduler")],
    "node_agent": [("-m", "services.node_agent", "node-b")],
    "rank": [("-m", "trainer", "node-a"), ("-m", "trainer", "node-b")],
}
"""Words of commands and variables, by what is killed."""
_ZERO = (
    "tokens_lost",
    "tokens_duplicated",
    "samples_trained_twice",
    "steps_lost_or_doubled",
    "rollouts_failed",
    "control.moves",
)


def main() -> None:
    """Measure, publish, and fail if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="the operator's moves alone, no result"
    )
    given = parser.parse_args()
    with TemporaryDirectory(prefix="seamflow-allocation-") as folder:
        figures = asyncio.run(_measured(Path(folder), given.seed, is_quick=given.quick))
    report = Report(bench="allocation_moves", figures=figures, seeds=[given.seed])
    report.publish(ROOT / "runs" / "bench" if given.quick else RESULTS)
    if broken := [name for name in _ZERO if figures.get(name)]:
        sys.exit(f"not 0: {', '.join(broken)}")


async def _measured(folder: Path, seed: int, *, is_quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    (folder / "moved").mkdir()
    async with running_job(folder / "moved") as job:
        figures |= await _by_operator(job)
        if not is_quick:
            figures |= await _by_allocation(job)
            figures |= await _with_kills(job, random.Random(seed))
        await job.finish()
        figures |= conserved(job)
    if not is_quick:
        figures |= await _to_training(folder / "training")
        (folder / "control").mkdir()
        figures["control.moves"] = await _control(folder / "control")
    return figures


async def _by_operator(job: RunningJob) -> dict[str, float]:
    await job.steps_follow()
    fewer = await _resized(job, 1)
    await job.steps_follow()
    more = await _resized(job, 2)
    await job.steps_follow()
    return {"operator_fewer_seconds": fewer, "operator_more_seconds": more}


async def _by_allocation(job: RunningJob) -> dict[str, float]:
    """Until the scheduler has moved a node to generation by what it measured."""
    job.pace(_SLOWER * job.step_seconds)
    fewer = await job.until("1 training node", lambda: _size(job) == 1)
    _say(job.causes("split")[-1])
    job.pace(0)
    await _resized(job, 2)
    await job.steps_follow()
    return {"allocation_fewer_seconds": fewer, "allocation_moves": len(job.causes("split"))}


async def _to_training(folder: Path) -> dict[str, float]:
    """Until the scheduler has given a node to training, which is the slower stage."""
    folder.mkdir()
    async with running_job(folder, row_seconds=_LONG_ROW_SECONDS) as job:
        await _resized(job, 1)
        more = await job.until("2 training nodes", lambda: _size(job) == 2)
        _say(job.causes("split")[-1])
        await job.steps_follow(1)
        return {"allocation_more_seconds": more}


async def _with_kills(job: RunningJob, chance: random.Random) -> dict[str, float]:
    """Seconds until two steps have followed a kill, at most."""
    longest, kills = 0.0, 0
    for name, victims in _VICTIMS.items():
        for number, words in enumerate(victims * 2):
            size = 1 + number % 2
            await _asked(job, size)
            await asyncio.sleep(chance.uniform(0, _LATEST_KILL))
            _kill(job, words)
            kills += 1
            seconds = await job.steps_follow(2)
            longest = max(longest, seconds)
            _say(f"{name} killed while {size} copies were asked for: 2 steps after {seconds:.1f} s")
            await _resized(job, size)
    return {"kills": kills, "seconds_to_steps_after_kill_max": longest}


async def _control(folder: Path) -> float:
    """Moves of a job whose agents never wait, within bounds that allow the present split alone."""
    bounds = ("scheduler.allocation.min_train_nodes=2",)
    async with running_job(folder, bounds) as job:
        job.pace(_CONTROL_SECONDS)
        await job.steps_follow(8)
        await job.finish()
        return len(job.causes("resized"))


async def _resized(job: RunningJob, size: int) -> float:
    """Ask for a number of copies until the scheduler knows that so many train."""
    began = time.monotonic()
    await _asked(job, size)
    while _size(job) != size:
        with suppress(RuntimeError):
            await job.until(f"{size} training nodes", lambda: _size(job) == size, seconds=10)
        if job.launcher.poll() is not None:
            raise RuntimeError("the job has ended")
        await _asked(job, size)  # a trainer that was restarted begins with all copies
    return time.monotonic() - began


async def _asked(job: RunningJob, size: int) -> None:
    """As an operator does who tries again while the trainer is away."""
    while True:
        try:
            return await job.set_replicas(size)
        except UnavailableError:
            await asyncio.sleep(0.2)


def _size(job: RunningJob) -> int:
    """Training nodes, as the audit log says."""
    sizes = [int(found[1]) for each in job.causes("resized") if (found := _TARGET.search(each))]
    return sizes[-1] if sizes else 2


def _kill(job: RunningJob, words: Sequence[str]) -> None:
    """SIGKILL for the process that has no children of its own, such as a rank below its keeper."""
    found = [each for each in job.processes(*words) if not each.children()]
    with suppress(psutil.NoSuchProcess):
        found[-1].kill()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
