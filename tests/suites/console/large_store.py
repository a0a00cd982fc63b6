"""A store of 100,000 rollouts, one of them with 65,536 tokens: how soon a browser shows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import grpc.aio
import numpy as np
import psutil
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.baselines.store.seamflow_run import RUN_ID, create_run, manager
from bench.baselines.store.workload import Options
from bench.harness.redis_process import FAST, redis_server
from tests.suites.console.browser import Visit, launched, visiting
from tests.suites.console.trained_run import console

ROLLOUTS = 100_000
TOKENS = 65_536
_SHORT = 24
_RECORDED_TOGETHER = 250
_REPEATS = 5


def large_figures(folder: Path, rollouts: int = ROLLOUTS) -> dict[str, float]:
    """Seconds until each view is shown, those of the API, and the memory of the console."""
    with (
        _store(rollouts) as target,
        console(folder, *_flags(target)) as shown,
        launched() as browser,
        visiting(browser, shown.link, RUN_ID) as visit,
    ):
        figures = {"rollouts": float(rollouts), "longest_rollout_tokens": float(TOKENS)}
        figures |= _views(visit)
        figures |= _calls(visit, "rollouts?limit=50", "list")
        figures |= _calls(visit, "rollouts?limit=50&reward_min=0.9", "filtered_list")
        memory = psutil.Process(shown.process.pid).memory_info().rss
        return {**figures, "console_mib": round(memory / 2**20, 1)}


def _flags(target: str) -> list[str]:
    """Only the trajectory manager runs; the other addresses have no listener."""
    others = ("rollout-gateway", "scheduler", "trainer", "weights")
    addresses = {"trajectory-manager": target, **dict.fromkeys(others, "127.0.0.1:1")}
    return ["--run-id", RUN_ID, *(f"--{name}={address}" for name, address in addresses.items())]


def _views(visit: Visit) -> dict[str, float]:
    page = visit.page
    found = {"list": _seconds(visit, "rollouts", "tbody tr")}
    assert page.locator("tbody tr").count() == 50
    visit.open(f"rollouts?tokens_min={TOKENS}")
    href = page.locator("tbody a[data-row]").first.get_attribute("href") or ""
    view = href.partition(f"/{RUN_ID}/")[2]
    found["transcript"] = _seconds(visit, view, ".part .text")
    found["tokens"] = _seconds(visit, f"{view}?tab=tokens&size=4096&from=32768", "[data-token]")
    assert page.locator("[data-token]").count() == 4096
    return {f"seconds_to_{name}": seconds for name, seconds in found.items()}


def _seconds(visit: Visit, view: str, wanted: str) -> float:
    """Median from entering a link to what it shows, in pages that keep nothing."""
    seconds = []
    for _ in range(_REPEATS):
        visit.page.goto("about:blank")
        began = time.monotonic()
        visit.page.goto(f"{visit.address}/#/r/{visit.run}/{view}", wait_until="commit")
        visit.page.locator(wanted).first.wait_for(timeout=60_000)
        seconds.append(time.monotonic() - began)
    return round(median(seconds), 3)


def _calls(visit: Visit, path: str, name: str) -> dict[str, float]:
    url = f"{visit.address}/api/runs/{visit.run}/{path}"
    seconds = []
    for _ in range(_REPEATS):
        began = time.monotonic()
        assert visit.context.request.get(url).ok
        seconds.append(time.monotonic() - began)
    return {f"{name}_ms": round(1000 * median(seconds), 1)}


@contextmanager
def _store(rollouts: int) -> Iterator[str]:
    """Address of the manager of a filled store; nothing awaits while it is used."""
    with asyncio.Runner() as runner, redis_server(FAST) as url:
        options = Options(seed=0, trajectories=rollouts, writers=1, batch=1, redis=url)
        filled = _filled(options)
        target = runner.run(filled.asend(None))
        try:
            yield target
        finally:
            runner.run(filled.aclose())


async def _filled(options: Options) -> AsyncGenerator[str, None]:
    async with manager(options) as target:
        async with connect(target) as channel:
            await create_run(channel, options, trajectory_pb2.DURABILITY_FAST)
            await _record(channel, options.trajectories)
        yield target


async def _record(channel: grpc.aio.Channel, number: int) -> None:
    stub = async_stub(TrajectoryServiceStub, channel)
    random = np.random.default_rng(0)
    for start in range(0, number - 1, _RECORDED_TOGETHER):
        indexes = range(start, min(start + _RECORDED_TOGETHER, number - 1))
        groups = [_group(random, f"task-{index}", _SHORT) for index in indexes]
        await stub.RecordGroups(pb.RecordGroupsRequest(run_id=RUN_ID, groups=groups))
    long = [_group(random, "long", TOKENS)]
    await stub.RecordGroups(pb.RecordGroupsRequest(run_id=RUN_ID, groups=long))


def _group(random: np.random.Generator, task_id: str, num_tokens: int) -> pb.RecordedGroup:
    """A group of one rollout with a prompt, and a sampled half at two weight versions."""
    prompt, first = num_tokens // 2, num_tokens // 4
    tokens = tokens_pb2.Tokens(
        token_ids=random.integers(0, 150_000, num_tokens).tolist(),
        logprobs=np.where(np.arange(num_tokens) < prompt, 0.0, -random.random(num_tokens)).tolist(),
        spans=[
            tokens_pb2.Span(start=0, num_tokens=prompt, origin=tokens_pb2.ORIGIN_ENVIRONMENT),
            _sampled(prompt, first, 1),
            _sampled(prompt + first, num_tokens - prompt - first, 2),
        ],
    )
    turn = trajectory_pb2.Turn(
        turn_id="turn", tokens=tokens, finish_reason=tokens_pb2.FINISH_REASON_STOP
    )
    reward = tokens_pb2.Reward(name="reward", value=round(float(random.random()), 2))
    rollout = pb.RecordedRollout(turns=[turn], rewards=tokens_pb2.Rewards(rewards=[reward]))
    return pb.RecordedGroup(task_id=task_id, rollouts=[rollout])


def _sampled(start: int, num_tokens: int, version: int) -> tokens_pb2.Span:
    return tokens_pb2.Span(
        start=start,
        num_tokens=num_tokens,
        origin=tokens_pb2.ORIGIN_POLICY,
        weight_version=version,
        version_source=tokens_pb2.VERSION_SOURCE_ENGINE,
        server_id="server-0",
    )
