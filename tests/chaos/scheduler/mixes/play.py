"""Many mixes of gangs, one after the other, against the rules or against a real scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import grpc.aio
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub

from bench.harness import processes
from scheduler.policy.allocation_policy import load_policy
from tests.chaos.scheduler.checker import Verdict
from tests.chaos.scheduler.mixes.mixes import play
from tests.chaos.scheduler.mixes.worlds import RealWorld, VirtualWorld
from tests.chaos.scheduler.outcome import Outcome
from tests.chaos.scheduler.rig import Lease, Variant, listening, scheduler_server
from tests.chaos.store.rig import Setting

# Nobody is silent here: who goes says so.
_ENDLESS = Lease(seconds=600.0, margin=120.0)


async def play_virtual(
    setting: Setting, mixes: int = 1000, variant: Variant | None = None
) -> Outcome:
    """Mixes against the policy and the scheduler's drafts, by a clock that is set."""
    name = (variant or Variant()).policy
    policy = load_policy(name, lending="always", min_dwell_seconds=5.0)
    verdict = Verdict()
    for random in _randoms(setting, mixes, "mixes of gangs, by the rules"):
        verdict += await play(VirtualWorld(policy), random)
    return Outcome(verdict=verdict, figures={"gang_mixes": mixes})


async def play_real(setting: Setting, mixes: int = 100, variant: Variant | None = None) -> Outcome:
    """Mixes against a scheduler process on Redis, over gRPC."""
    verdict = Verdict()
    with ExitStack() as stack:
        redis = stack.enter_context(processes.redis_server(setting.folder / "redis"))
        scheduler = scheduler_server(setting.folder, redis.port, _ENDLESS, variant or Variant())
        stack.push(scheduler)
        scheduler.start()
        await listening(scheduler)
        async with grpc.aio.insecure_channel(scheduler.address) as channel:
            world = RealWorld(async_stub(SchedulerServiceStub, channel))
            for random in _randoms(setting, mixes, "mixes of gangs, over gRPC"):
                verdict += await play(world, random)
                await world.leave()
    return Outcome(verdict=verdict, figures={"gang_mixes_over_grpc": mixes})


def _randoms(setting: Setting, count: int, what: str) -> Iterator[Random]:
    bar = setting.progress.add_task(what, total=count)
    for number in range(count):
        yield Random(f"{setting.seed}-{number}")
        setting.progress.advance(bar)
