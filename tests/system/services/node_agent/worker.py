"""A worker in a separate process.

`python -m tests.system.services.node_agent.worker NAME PORT FOLDER TRAIT...`.

Its device is a locked file of the folder, so two owners cannot be. What happens is appended to the
folder's journal as "NAME EVENT EPOCH PID". Traits: "stubborn" ignores SIGTERM, "hung" never answers
Deactivate, "parent" gives the device to its child in another session.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from seamflow.worker.v1 import worker_service_pb2 as pb
from seamflow.worker.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)

_DEVICE_BYTES = 1000


class Worker(WorkerServiceServicer):
    """Holds the device while it is on."""

    def __init__(self, name: str, folder: Path, traits: set[str]) -> None:
        self._name = name
        self._folder = folder
        self._traits = traits
        self._device = -1
        self._epoch = 0

    def note(self, event: str) -> None:
        """Append to the journal."""
        with (self._folder / "journal").open("a") as journal:
            print(self._name, event, self._epoch, os.getpid(), file=journal)

    async def Activate(self, request: pb.ActivateRequest, context: Any) -> pb.ActivateResponse:
        """Take the device, or fail while another worker holds it."""
        self._epoch = request.epoch
        if self._device < 0:
            device = os.open(self._folder / "device", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(device)
                self.note("refused")
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the device is taken")
            self._device = device
            if "parent" in self._traits:
                command = [sys.executable, "-c", "import time; time.sleep(600)", str(self._folder)]
                child = subprocess.Popen(command, pass_fds=[device], start_new_session=True)
                (self._folder / "child").write_text(str(child.pid))
        self.note("on")
        return pb.ActivateResponse()

    async def Deactivate(
        self, request: pb.DeactivateRequest, context: Any
    ) -> pb.DeactivateResponse:
        """Give the device back."""
        self._epoch = request.epoch
        if "hung" in self._traits and self._device >= 0:
            self.note("hangs")
            await asyncio.Event().wait()
        if self._device >= 0:
            os.close(self._device)
            self._device = -1
            self.note("off")
        return pb.DeactivateResponse()

    async def GetStatus(self, request: Any, context: Any) -> pb.GetStatusResponse:
        """As it is."""
        is_on = self._device >= 0
        return pb.GetStatusResponse(
            state=pb.WORKER_STATE_ON if is_on else pb.WORKER_STATE_OFF,
            epoch=self._epoch,
            used_device_bytes=_DEVICE_BYTES if is_on else 0,
        )


async def main(name: str, port: str, folder: str, *traits: str) -> None:
    """Serve until SIGTERM."""
    worker, ended = Worker(name, Path(folder), set(traits)), asyncio.Event()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_WorkerServiceServicer_to_server(worker, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    told = (lambda: None) if "stubborn" in traits else ended.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told)
    worker.note("up")
    await ended.wait()
    worker.note("ended")
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
