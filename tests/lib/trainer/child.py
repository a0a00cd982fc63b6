"""A trainer in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from seamflow.channel import connect
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc

from tests.lib.trainer.services import Neighbours
from tests.lib.trainer.support import JOB_CONFIG, ROOT, environment


class Child:
    """A trainer process and its output."""

    def __init__(self, folder: Path, model: Path, neighbours: Neighbours) -> None:
        self.port_file = folder / "port.json"
        self.metrics_file = folder / "metrics.jsonl"
        self._arguments = [
            *("--run-id", "r", "--model", str(model)),
            *("--checkpoint.folder", str(folder / "checkpoints")),
            *("--trajectory-manager", neighbours.address, "--weights", neighbours.address),
            *("--tracking.metrics-file", str(self.metrics_file), "--exit-when-finished"),
            *("--checkpoint.every", "1"),
            *(
                f"--{name.replace('__', '.').replace('_', '-')}={value}"
                for name, value in JOB_CONFIG.items()
            ),
        ]

    async def start(self, *extra: str, launcher: tuple[str, ...] = ()) -> None:
        """Start it with more flags."""
        self.port_file.unlink(missing_ok=True)
        command = [*launcher, "-m", "trainer", *self._arguments, *extra]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=ROOT,
            env=environment(SEAMFLOW_PORT_FILE=str(self.port_file)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def finish(self) -> tuple[int, str]:
        """Its exit code and output."""
        assert self.process.stdout is not None
        output = await self.process.stdout.read()
        return await self.process.wait(), output.decode()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[trainer_grpc.TrainerServiceAsyncStub]:
        """A client, once it serves."""
        while not self.port_file.exists():
            assert self.process.returncode is None
            await asyncio.sleep(0.02)
        port = json.loads(self.port_file.read_text())["port"]
        async with connect(f"127.0.0.1:{port}") as channel:
            yield async_stub(trainer_grpc.TrainerServiceStub, channel)
