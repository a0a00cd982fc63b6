"""`make bench-turns`: 1,000 turns at a time through one gateway, and 100 of them cancelled at once.

The engines are emulated: rollout servers of their own processes whose fake engine takes a fixed
time for each token. All else is real: agents with the SDK, the gateway, a trajectory manager on
Redis. Everything shares this machine's cores, so latencies are those of a loaded machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import grpc.aio
import numpy as np
import psutil
import uvloop
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from seamflow import Client
from seamflow.channel import connect
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.baselines.store.seamflow_run import RUN_ID, create_run, manager
from bench.baselines.store.workload import Options
from bench.harness.byte_model import make_byte_model
from bench.harness.redis_process import FAST, redis_server
from bench.report import Report

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

TURNS = 1000
CANCELLED = 100
ROUNDS = 5
SERVERS = 4
SLOTS = 256
STEP_SECONDS = 0.1
STREAM_INTERVAL = 8
TURN_TOKENS = 3000
"""More than any turn gets to: all of them are cancelled in the end."""
PROMPT_TOKENS = 64
VOCABULARY = 256
_CLIENTS = 8  # connections, as of agents in several processes
_RAMP_SECONDS = 10.0
_SETTLE_SECONDS = 2.0
_STEADY_SECONDS = 10.0
_POLL_SECONDS = 0.002
_START_SECONDS = 60.0


@dataclass(slots=True)
class Seen:
    """What the agents saw."""

    first_seconds: list[float] = field(default_factory=list)
    """From asking for a turn to its first tokens."""
    gap_seconds: list[float] = field(default_factory=list)
    """From one chunk of a turn to its next."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Rollout -> the sampled ids of its turn."""
    num_tokens: int = 0
    """Of all turns."""
    last: dict[str, float] = field(default_factory=dict)
    """Rollout -> when it asked, or when its last chunk came."""

    def observe(self, rollout_id: str, turn_id: str, chunk: pb.TokenChunk) -> None:
        """One chunk has come."""
        now = time.monotonic()
        known = self.tokens.setdefault(rollout_id, [])
        (self.gap_seconds if known else self.first_seconds).append(now - self.last[rollout_id])
        self.last[rollout_id] = now
        known.extend(chunk.tokens.token_ids)
        self.num_tokens += len(chunk.tokens.token_ids)


class Agents:
    """Agents with one long turn each."""

    def __init__(self, clients: Sequence[Client], random: Random, seen: Seen) -> None:
        self._clients = clients
        self._random = random
        self._seen = seen
        self._count = 0
        self._playing: list[asyncio.Task[None]] = []

    def start(self, number: int, within: float) -> None:
        """Start so many turns, spread over `within` seconds."""
        delays = [self._random.uniform(0.0, within) for _ in range(number)]
        self._playing += [asyncio.create_task(self._play(delay)) for delay in delays]

    def cancel(self, number: int) -> None:
        """Cancel so many turns, all at once. Raises what a turn has failed with."""
        self._random.shuffle(self._playing)
        for task in self._playing[:number]:
            if task.done():
                task.result()
            task.cancel()
        del self._playing[:number]

    async def end(self) -> None:
        """Cancel all turns."""
        left = self._playing.copy()
        self.cancel(len(left))
        await asyncio.wait(left)

    async def _play(self, delay: float) -> None:
        self._count += 1
        rollout_id = f"rollout-{self._count}"
        prompt = [self._random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        await asyncio.sleep(delay)
        rollout = await self._clients[self._count % _CLIENTS].start_rollout(rollout_id)
        self._seen.last[rollout_id] = time.monotonic()
        await rollout.generate(
            token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=TURN_TOKENS, ignore_eos=True),
            turn_id="turn",
            chunk_seconds=0.0,  # what is measured is when chunks come
        )


class Engines:
    """The rollout servers, asked directly."""

    def __init__(self, channels: Iterable[grpc.aio.Channel]) -> None:
        self._stubs: list[RolloutServerServiceAsyncStub] = [
            async_stub(RolloutServerServiceStub, channel) for channel in channels
        ]

    async def num_turns(self) -> int:
        """Turns that engines run or hold in their queues."""
        asked = (stub.GetServerInfo(server_pb.GetServerInfoRequest()) for stub in self._stubs)
        return sum(info.num_running + info.num_queued for info in await asyncio.gather(*asked))

    async def until(self, num_turns: int) -> None:
        """Wait until they have so many."""
        while await self.num_turns() != num_turns:
            await asyncio.sleep(0.05)

    async def stops(self, num_turns: int, most: int) -> list[float]:
        """When, in seconds from now, each of `most` of their `num_turns` turns had stopped."""
        started, seconds = time.monotonic(), list[float]()
        while len(seconds) < most:
            stopped = num_turns - await self.num_turns()
            seconds += [time.monotonic() - started] * (stopped - len(seconds))
            await asyncio.sleep(_POLL_SECONDS)
        return seconds


@dataclass(slots=True)
class World:
    """Everything that was started."""

    gateway: psutil.Process
    engines: Engines
    agents: Agents
    store: TrajectoryServiceAsyncStub
    seen: Seen


@dataclass(slots=True)
class Measured:
    """What a run of it gives."""

    rss: list[float] = field(default_factory=list)
    """Bytes of the gateway: first idle, then while turns ran."""
    steady_tokens: float = 0.0
    """Tokens per second, all turns under way."""
    steady_cpu: float = 0.0
    """Share of one core that the gateway used meanwhile."""
    stop_seconds: list[list[float]] = field(default_factory=list)
    """By round: from cancelling to each engine's stop."""


def main() -> None:
    """Run it and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as run:
        report = run.run(_measured(seed, progress))
    report.publish()


async def _measured(seed: int, progress: Progress) -> Report:
    bar = progress.add_task("start", total=2 + ROUNDS)
    async with _world(seed) as world:
        measured = Measured(rss=[world.gateway.memory_info().rss])
        progress.update(bar, description=f"{TURNS} turns", advance=1)
        await _steady(world, measured)
        for number in range(ROUNDS):
            progress.update(bar, description=f"cancel {number + 1}/{ROUNDS}", advance=1)
            measured.stop_seconds.append(await _cancelled(world, measured))
        progress.update(bar, description="compare with the store", advance=1)
        await world.agents.end()
        lost = await _tokens_lost(world)
    return _report(seed, world.seen, measured, lost)


async def _steady(world: World, measured: Measured) -> None:
    """Start all turns and look at them for a while."""
    world.agents.start(TURNS, _RAMP_SECONDS)
    await world.engines.until(TURNS)
    await asyncio.sleep(_SETTLE_SECONDS)
    world.seen.gap_seconds.clear()
    before, started, tokens = _cpu(world.gateway), time.monotonic(), world.seen.num_tokens
    while (elapsed := time.monotonic() - started) < _STEADY_SECONDS:
        measured.rss.append(world.gateway.memory_info().rss)
        await asyncio.sleep(0.1)
    measured.steady_tokens = (world.seen.num_tokens - tokens) / elapsed
    measured.steady_cpu = (_cpu(world.gateway) - before) / elapsed


async def _cancelled(world: World, measured: Measured) -> list[float]:
    """Cancel some turns, see the engines stop, and start as many new ones."""
    world.agents.cancel(CANCELLED)
    seconds = await world.engines.stops(TURNS, CANCELLED)
    world.agents.start(CANCELLED, 0.5)
    await world.engines.until(TURNS)
    measured.rss.append(world.gateway.memory_info().rss)
    return seconds


async def _tokens_lost(world: World) -> int:
    """Tokens that agents have and the store has not, or not the same."""
    lost = 0
    for rollout_id, received in world.seen.tokens.items():
        request = store_pb.GetTrajectoryRequest(run_id=RUN_ID, rollout_id=rollout_id)
        (turn,) = (await world.store.GetTrajectory(request)).trajectory.turns
        stored = list(turn.tokens.token_ids)[PROMPT_TOKENS:]
        same = sum(a == b for a, b in zip(received, stored, strict=False))
        lost += len(received) - same
    return lost


def _report(seed: int, seen: Seen, measured: Measured, lost: int) -> Report:
    idle, peak = measured.rss[0], max(measured.rss)
    stops = [1e3 * seconds for round_ in measured.stop_seconds for seconds in round_]
    figures = {
        "turns": TURNS,
        "gateway_rss_before_mb": idle / 1e6,
        "gateway_rss_peak_mb": peak / 1e6,
        "gateway_kb_per_turn": (peak - idle) / TURNS / 1e3,
        "gateway_cpu_share": measured.steady_cpu,
        "tokens_per_second": measured.steady_tokens,
        "tokens_per_gateway_cpu_second": measured.steady_tokens / measured.steady_cpu,
        "engine_chunk_ms": 1e3 * STEP_SECONDS * STREAM_INTERVAL,
        **_percentiles("first_token", seen.first_seconds),
        **_percentiles("inter_chunk", seen.gap_seconds),
        "cancel_rounds": ROUNDS,
        "cancel_to_engine_stop_p99_ms": float(np.percentile(stops, 99)),
        "cancel_to_engine_stop_ms": max(stops),
        "tokens_received": seen.num_tokens,
        "tokens_lost": lost,
    }
    raw = {
        "cancel_to_engine_stop_ms": [1e3 * max(seconds) for seconds in measured.stop_seconds],
        "gateway_rss_mb": [rss / 1e6 for rss in measured.rss],
    }
    return Report(bench="turns", figures=figures, raw=raw, seeds=[seed])


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99])
    return {f"{name}_p50_ms": 1e3 * float(p50), f"{name}_p99_ms": 1e3 * float(p99)}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def _world(seed: int) -> AsyncIterator[World]:
    rounds = TURNS + ROUNDS * CANCELLED
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seamflow-bench-")))
        url = stack.enter_context(redis_server(FAST))
        options = Options(seed=seed, trajectories=rounds, writers=1, batch=1, redis=url)
        address = await stack.enter_async_context(manager(options))
        channel = await stack.enter_async_context(connect(address))
        await create_run(channel, options, trajectory_pb2.DURABILITY_FAST)
        servers = [await stack.enter_async_context(_server(folder, i)) for i in range(SERVERS)]
        pid, gateway = await stack.enter_async_context(_gateway(folder, address, servers))
        asked = [await stack.enter_async_context(connect(server)) for server in servers]
        seen, store = Seen(), TrajectoryServiceStub(channel)
        clients = [
            await stack.enter_async_context(Client(gateway, run_id=RUN_ID, observer=seen.observe))
            for _ in range(_CLIENTS)
        ]
        agents = Agents(clients, Random(seed), seen)
        yield World(psutil.Process(pid), Engines(asked), agents, store, seen)  # type: ignore[arg-type]


@asynccontextmanager
async def _server(folder: Path, number: int) -> AsyncIterator[str]:
    flags = {
        "engine": "fake",
        "run-id": RUN_ID,
        "server-id": f"server-{number}",
        "max-running": SLOTS,
        "stream-interval": STREAM_INTERVAL,
        "fake-step-seconds": STEP_SECONDS,
        "fake-mean-tokens": 0,
        "fake-vocab-size": VOCABULARY,
    }
    async with _process("rollout.server", folder / f"server-{number}.port", flags) as (_, address):
        yield address


@asynccontextmanager
async def _gateway(
    folder: Path, store: str, servers: Sequence[str]
) -> AsyncIterator[tuple[int, str]]:
    flags = {
        "run-id": RUN_ID,
        "model": make_byte_model(folder / "model"),
        "trajectory-manager": store,
        "servers": ",".join(servers),
    }
    async with _process("rollout.gateway", folder / "gateway.port", flags) as started:
        yield started


@asynccontextmanager
async def _process(
    module: str, port_file: Path, flags: dict[str, object]
) -> AsyncIterator[tuple[int, str]]:
    """Its process id and address."""
    given = {"port": 0, "admin-port": -1, "log-level": "warning", "drain-seconds": 1, **flags}
    command = ["-m", module]
    command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
    environment = {**os.environ, "SEAMFLOW_PORT_FILE": str(port_file), "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment)
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not await asyncio.to_thread(port_file.exists):
                if process.returncode is not None:
                    raise RuntimeError(f"{module} ended with exit code {process.returncode}")
                await asyncio.sleep(0.02)
        written = json.loads(await asyncio.to_thread(port_file.read_text))
        yield process.pid, f"127.0.0.1:{written['port']}"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


if __name__ == "__main__":
    main()
