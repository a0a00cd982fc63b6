"""The weights service as a process of its own, which a test may kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from seamflow.channel import connect
from seamflow.stubs import async_stub
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from tests.lib.weights.support import Trainer

START_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsProcess:
    """A running process."""

    process: asyncio.subprocess.Process
    """Killed with SIGKILL at the end of the test."""
    port: int
    """Where it listens."""
    channel: grpc.aio.Channel
    """To it, as trainers open it."""
    trainer: Trainer
    """A client of it."""

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.process.pid, signal.SIGKILL)


async def launch(*arguments: str, port_file: Path, port: int = 0) -> asyncio.subprocess.Process:
    """`python -m services.weights` with these flags, by default on a free port."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.weights", "--port", str(port), "--admin-port", "-1", *arguments),
        env={**os.environ, "SEAMFLOW_PORT_FILE": str(port_file), "PYTHONPATH": ":".join(sys.path)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def running(
    folder: Path, redis_url: str, *flags: str, port: int = 0
) -> AsyncIterator[WeightsProcess]:
    """The process with its files in `folder`, whose name is the run's."""
    port_file = folder / "port.json"
    port_file.unlink(missing_ok=True)
    process = await launch(
        *("--folder", str(folder / "weights"), "--redis-url", redis_url, *flags),
        port_file=port_file,
        port=port,
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            while not port_file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        port = json.loads(port_file.read_text())["port"]
        address = f"127.0.0.1:{port}"
        async with connect(address) as channel, grpc.aio.insecure_channel(address) as plain:
            trainer = Trainer(stub=async_stub(WeightServiceStub, plain), run_id=folder.name)
            yield WeightsProcess(process=process, port=port, channel=channel, trainer=trainer)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
