"""Requests that one core serves: by the HTTP gateway and by its peers, each on a core of its own.

All else is on the other cores: the agents, the engine, and what is between it and the HTTP gateway.
Where that is the slower part, the server's core is not busy all the time (`core_share`); what is
compared is requests per second of its CPU time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from statistics import median

import psutil

from bench.baselines.environments import interpreter, module_of
from bench.harness.processes import Server, environment
from bench.harness.redis_process import free_port
from bench.http_gateway.calls import by_http, echoed, post
from bench.http_gateway.world import World, cpu_seconds
from bench.report import ratios

OURS, PEER, ECHO = "http_gateway", "fastapi_emulation", "aiohttp_echo"
_AGENTS = 16
_WHOLE_CALLS, _ECHO_CALLS = 8, 80
"""For each streamed call: cheap ones need more, CPU time is counted in hundredths of a second."""

Calls = Sequence[Callable[[], Awaitable[object]]]


async def measure(
    world: World, raw: dict[str, list[float]], rounds: int, num_calls: int
) -> dict[str, float]:
    """Figures of each server, with whole and with streamed replies; the echo server has no streams.

    Each round has `num_calls` streamed calls of a server, and more of the cheaper ones.
    """
    samples = defaultdict[str, list[float]](list)
    with _baseline(world, PEER) as peer, _baseline(world, ECHO) as echo:
        for _ in range(rounds):
            for name, server in ((OURS, world.http_gateway), (PEER, peer)):
                calls = await _chats(world, server, False, _WHOLE_CALLS * num_calls)
                await _round(samples, f"whole.{name}", server, calls)
                calls = await _chats(world, server, True, num_calls)
                await _round(samples, f"streamed.{name}", server, calls)
            calls = _echoes(world, echo, _ECHO_CALLS * num_calls)
            await _round(samples, f"whole.{ECHO}", echo, calls)
    raw |= samples
    return {name: median(values) for name, values in samples.items()} | _ratios(samples, rounds)


def _ratios(samples: dict[str, list[float]], rounds: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for kind, name in (("whole", PEER), ("streamed", PEER), ("whole", ECHO)):
        ours, theirs = (samples[f"{kind}.{n}.requests_per_cpu_second"] for n in (OURS, name))
        figures |= ratios(f"{kind}.requests_vs_{name}", ours, theirs, least=rounds)
    return figures


async def _chats(world: World, server: Server, stream: bool, number: int) -> Calls:
    if server is world.http_gateway:
        rollouts = await world.rollouts(number)
        return [partial(by_http, world, rollout, stream) for rollout in rollouts]
    url = f"http://{server.address}/v1/chat/completions"
    return [partial(post, world.http, url, {}, stream)] * number


def _echoes(world: World, server: Server, number: int) -> Calls:
    return [partial(echoed, world.http, f"http://{server.address}/")] * number


async def _round(
    samples: defaultdict[str, list[float]], name: str, server: Server, calls: Calls
) -> None:
    """Make `calls`, so many at a time as there are agents."""
    left = iter(calls)

    async def agent() -> None:
        for call in left:
            await call()

    with _alone_on_a_core(server.pid):
        before, began = cpu_seconds(server), time.perf_counter()
        await asyncio.gather(*(agent() for _ in range(_AGENTS)))
        seconds, cpu = time.perf_counter() - began, cpu_seconds(server) - before
    samples[f"{name}.requests_per_cpu_second"].append(len(calls) / cpu)
    samples[f"{name}.requests_per_second"].append(len(calls) / seconds)
    samples[f"{name}.core_share"].append(cpu / seconds)


@contextmanager
def _baseline(world: World, name: str) -> Iterator[Server]:
    port = free_port()
    command = [str(interpreter(name)), "-m", module_of(name), str(port), world.engine.address]
    with Server(name, command, world.folder, environment(), port) as server:
        yield server


@contextmanager
def _alone_on_a_core(pid: int) -> Iterator[None]:
    """The process has the first core; this one and all that it has started have the others."""
    cores = os.sched_getaffinity(0)
    first = {min(cores)}
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
    for process in ours:
        _pin(process, first if process.pid == pid else (cores - first or cores))
    try:
        yield
    finally:
        for process in ours:
            _pin(process, cores)


def _pin(process: psutil.Process, cores: set[int]) -> None:
    for thread in process.threads():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread.id, cores)
