"""The process as an operator meets it: killed beside a replica, or on a store that will not do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio
from seamflow.common.v1 import tokens_pb2

from services.lib.token_bytes import unpack_ids
from tests.lib.trajectory_manager.client import Client, message

START_SECONDS = 30


async def launch(port_file: Path, *flags: str) -> asyncio.subprocess.Process:
    """`python -m trajectory_manager` with these flags on a free port."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "trajectory_manager", "--port", "0", "--admin-port", "-1", *flags),
        env={**os.environ, "SEAMFLOW_PORT_FILE": str(port_file), "PYTHONPATH": ":".join(sys.path)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def running(folder: Path, run_id: str, redis_url: str) -> AsyncIterator[tuple[Client, int]]:
    """The process, as a client of it and its pid; killed with SIGKILL at the end."""
    port_file = folder / f"{uuid.uuid4().hex}.json"
    process = await launch(port_file, "--redis-url", redis_url)
    try:
        async with asyncio.timeout(START_SECONDS):
            while not port_file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        port = json.loads(port_file.read_text())["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel, run_id), process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_replica_takes_nothing_with_it(tmp_path: Path, redis_url: str) -> None:
    """SIGKILL in mid-turn: the other replica has the tokens, the lease and the group."""
    run_id = uuid.uuid4().hex
    async with AsyncExitStack() as stack:
        dying = running(tmp_path, run_id, redis_url)
        surviving = running(tmp_path, run_id, redis_url)
        (first, pid), (second, _) = await asyncio.gather(
            stack.enter_async_context(dying), stack.enter_async_context(surviving)
        )
        await first.create_run()
        await first.submit("a")
        await first.play()
        lease = await first.lease()
        name = lease.rollout_id
        await first.start(name, lease.lease_token)
        opened = await first.begin(name, "t", [1, 2], "gateway-1")
        await first.append(name, "t", opened.epoch, 0, message([1, 2]))
        await first.append(name, "t", opened.epoch, 2, message([3], tokens_pb2.ORIGIN_POLICY, 1))
        epoch = await first.reconcile()
        os.kill(pid, signal.SIGKILL)
        again = await second.begin(name, "t", [1, 2], "gateway-2")
        assert list(unpack_ids(again.tokens.token_ids)) == [1, 2, 3]
        sampled = message([4], tokens_pb2.ORIGIN_POLICY, 2)
        assert await second.append(name, "t", again.epoch, 3, sampled) == 4
        await second.end(name, "t", again.epoch)
        await second.finish(name)
        leased = await second.lease_samples(epoch, 1, base=1)
        assert [sample.rollout_id for sample in leased.samples] == ["a/0/1", name]
        spans = leased.samples[1].tokens.spans
        assert [(span.num_tokens, span.weight_version) for span in spans] == [
            (2, 0),
            (1, 1),
            (1, 2),
        ]


async def outcome(tmp_path: Path, *flags: str) -> tuple[int | None, str]:
    """Exit code and stderr of a process that does not come up."""
    process = await launch(tmp_path / "port.json", *flags)
    _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def test_a_store_that_does_not_answer_is_said(tmp_path: Path) -> None:
    """Exit 69 with the setting to correct, once the 15 s that it may take to start are over."""
    code, stderr = await outcome(tmp_path, "--redis-url", "redis://127.0.0.1:1/0")
    assert code == 69
    assert "redis" in stderr
    assert "redis_url" in stderr


async def test_a_store_is_required(tmp_path: Path) -> None:
    """Without redis_url nothing would survive a restart: exit 78."""
    code, stderr = await outcome(tmp_path)
    assert code == 78
    assert "redis_url is not set: give --redis-url" in stderr


async def test_a_store_that_promises_less_is_refused(tmp_path: Path, redis_url: str) -> None:
    """durability = durable needs appendfsync always: exit 78 before any acknowledgement."""
    code, stderr = await outcome(tmp_path, "--durability", "durable", "--redis-url", redis_url)
    assert code == 78
    assert "durability is durable" in stderr
