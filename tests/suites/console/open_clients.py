"""What five open pages cost a run that trains: its steps with them and without, in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Thread

import aiohttp
import psutil

from tests.suites.console.trained_run import TrainedRun, training

CLIENTS = 5
WINDOW_STEPS = 8
PAIRS = 10
IDLE_SECONDS = 20.0
_UNCHANGED = (
    *("--set", "trainer.optimizer.learning_rate=1e-12"),
    *("--set", "evaluation.every_steps=1000"),
)
"""So that later steps are as long as early ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    seconds: float
    """Of `WINDOW_STEPS` steps."""
    console: float
    """CPU seconds of the console meanwhile."""


def client_figures(folder: Path) -> dict[str, float]:
    """The share of throughput that open pages take, and the console's share of a core.

    Windows follow each other as none, open, open, none: what drifts meets both alike.
    """
    steps = (2 * PAIRS + 2) * (WINDOW_STEPS + 1) + 40
    with training(folder, steps, *_UNCHANGED) as run:
        run.wait_for_step(5)
        (process,) = run.processes("services.console")
        idle = _cpu_share(process, IDLE_SECONDS)
        pairs = [_pair(run, process, openly_first=index % 2 == 1) for index in range(PAIRS)]
    closed, opened = (list(each) for each in zip(*pairs, strict=True))
    ratios = [one.seconds / other.seconds for one, other in pairs]
    return {
        "clients": CLIENTS,
        "pairs": PAIRS,
        "throughput_with_clients": round(_seconds(closed) / _seconds(opened), 4),
        "throughput_with_clients_median": round(median(ratios), 4),
        "console_core_share_idle": round(idle, 4),
        "console_core_share_with_clients": round(_core_share(opened), 4),
    }


def _pair(
    run: TrainedRun, console: psutil.Process, *, openly_first: bool
) -> tuple[_Window, _Window]:
    """A window without pages and one with them."""
    if openly_first:
        with _clients(run.link(), run.folder.name):
            opened = _window(run, console)
        return _window(run, console), opened
    closed = _window(run, console)
    with _clients(run.link(), run.folder.name):
        return closed, _window(run, console)


def _window(run: TrainedRun, console: psutil.Process) -> _Window:
    """From the end of the next step to that of the last one."""
    first = run.steps()[-1] + 1
    run.wait_for_step(first)
    began, used = time.monotonic(), _cpu_seconds(console)
    run.wait_for_step(first + WINDOW_STEPS)
    return _Window(seconds=time.monotonic() - began, console=_cpu_seconds(console) - used)


def _seconds(windows: list[_Window]) -> float:
    return sum(each.seconds for each in windows)


def _core_share(windows: list[_Window]) -> float:
    return sum(each.console for each in windows) / _seconds(windows)


def _cpu_share(process: psutil.Process, seconds: float) -> float:
    used = _cpu_seconds(process)
    time.sleep(seconds)
    return (_cpu_seconds(process) - used) / seconds


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _clients(link: str, run: str) -> Iterator[None]:
    """Readers that ask for what an open overview does; no browser draws."""
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(_follow(link, run)) for _ in range(CLIENTS)]
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        failed = [each for each in tasks if each.done()]
        for task in tasks:
            loop.call_soon_threadsafe(task.cancel)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
    assert not failed, failed


async def _follow(link: str, run: str) -> None:
    address, _, token = link.partition("/?token=")
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(f"{address}/api/runs/{run}/", headers=headers) as session:
        await _read(session, "overview")
        await _read(session, "steps?names=reward_mean")
        async with session.get("events", timeout=aiohttp.ClientTimeout(total=None)) as events:
            events.raise_for_status()
            async for line in events.content:
                if line.startswith((b"event: status", b"event: step")):
                    await _read(session, "overview")
                if line.startswith(b"event: step"):
                    await _read(session, "steps?names=reward_mean")
    raise RuntimeError("the console ended the events")


async def _read(session: aiohttp.ClientSession, path: str) -> None:
    async with session.get(path) as response:
        response.raise_for_status()
        await response.read()
