"""Negative controls: one safety rule is off, and the checker must find the violation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from seamflow.trajectory.v1 import trajectory_pb2

from bench.harness import processes
from tests.chaos.proxy import Proxy
from tests.chaos.store.checker import Verdict, check_tokens
from tests.chaos.store.failover import can_cut, unsafe_cut
from tests.chaos.store.freezes import freeze_holders
from tests.chaos.store.history import Log, read_history
from tests.chaos.store.processes.unfenced_manager import SCRIPTS_VARIABLE, unfenced_scripts
from tests.chaos.store.rig import Setting, under_load

_FREEZES = 10
_MOST_TRIES = 5
_LOAD_SECONDS = 1.0
_EVERYSEC_SECONDS = 5.0
_SLOW_MILLISECONDS = 1500


def fencing_off(setting: Setting) -> Verdict:
    """Without the check of the epoch, who was frozen writes into the turn of its successor."""
    scripts = unfenced_scripts(setting.folder / "lua")
    return freeze_holders(
        setting,
        _FREEZES,
        holds=("turn",),
        module="tests.chaos.store.processes.unfenced_manager",
        extra={SCRIPTS_VARIABLE: str(scripts)},
    )


def everysec(setting: Setting) -> Verdict:
    """With `appendfsync everysec` on a slow disk, a kill takes acknowledged tokens with it."""
    for number in range(_MOST_TRIES):
        verdict = _everysec(setting.part(str(number)))
        if verdict.violations:
            break
    return verdict


def _everysec(setting: Setting) -> Verdict:
    server = processes.redis_server(setting.folder / "redis", "everysec", _SLOW_MILLISECONDS)
    manager = processes.manager(setting.folder, processes.redis_url(server), durability="fast")
    fast = trajectory_pb2.DURABILITY_FAST
    with under_load(setting, redis=server, manager=manager, durability=fast) as rig:
        # Long enough for the first fsyncs: the run itself is then on disk.
        time.sleep(_EVERYSEC_SECONDS)
        server.kill()
        # Nobody may write again what was lost.
        rig.writers.kill()
        server.start()
        return rig.count_tokens()


def forward_first(setting: Setting) -> Verdict:
    """Tokens shown before they are recorded are gone when the gateway dies in between."""
    server = processes.redis_server(setting.folder / "redis")
    manager = processes.manager(setting.folder, processes.redis_url(server))
    flags = ("--forward-first",)
    with under_load(setting, redis=server, manager=manager, writer_flags=flags) as rig:
        time.sleep(_LOAD_SECONDS)
        # What is shown now waits for a manager, until its gateway dies too.
        manager.kill()
        time.sleep(_LOAD_SECONDS)
        rig.writers.kill()
        manager.start()
        return rig.count_tokens()


def retries_on(setting: Setting) -> Verdict:
    """redis-py as it comes repeats an append whose answer was lost."""
    log = Log(setting.folder / "acks.jsonl")
    server = processes.redis_server(setting.folder / "redis")
    with server:
        stored = asyncio.run(_append_with_retries(server.port, log))
    return check_tokens(read_history(setting.folder / "acks.jsonl"), {_TURN: stored})


def controls() -> dict[str, Callable[[Setting], Verdict]]:
    """Every control that this machine can run, by name; each must find a violation."""
    cut = {"partition without replicas": unsafe_cut} if can_cut() else {}
    return {
        "fencing off": fencing_off,
        "everysec on a slow disk": everysec,
        "forward before record": forward_first,
        "retries of redis-py": retries_on,
        **cut,
    }


_TURN = ("rollout", "turn")
_IDS = (1, 2, 3, 4)


async def _append_with_retries(port: int, log: Log) -> list[int]:
    """One append per id to a plain stream, one answer lost; what the stream then holds."""
    async with Proxy(port).serving() as proxy, Redis(port=proxy.port) as client:
        for offset, token_id in enumerate(_IDS):
            if offset == len(_IDS) // 2:
                proxy.swallow()
            await client.xadd("stream", {"id": token_id})
            log.write(
                "tokens", rollout_id=_TURN[0], turn_id=_TURN[1], offset=offset, ids=[token_id],
                sent=time.monotonic(), received=time.monotonic(),
            )  # fmt: skip
        entries: list[Any] = list(await client.xrange("stream") or ())
        return [int(fields[b"id"]) for _, fields in entries]
