"""A trainer's sender: publishes one version after another, file by file, whatever dies."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
import time
from pathlib import Path

import grpc.aio
from seamflow.stubs import async_stub
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from tests.lib.weights.support import Trainer, describe

RUN = "publish-kills"
CHANNEL = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]
_FILES, _BYTES = 4, 1_500_000


def contents(step: int) -> dict[str, bytes]:
    """The files of a step: no byte of two steps has to be equal."""
    return {
        f"model-{number}.safetensors": hashlib.shake_256(f"{step}/{number}".encode()).digest(_BYTES)
        for number in range(_FILES)
    }


async def _publish(trainer: Trainer, step: int, progress: Path) -> None:
    def note(phase: str) -> None:
        line = {"step": step, "version": version, "phase": phase, "time": time.monotonic()}
        with progress.open("a") as log:
            log.write(json.dumps(line) + "\n")

    version = (await trainer.begin(step)).weight_version
    files = contents(step)
    for name, data in files.items():
        note(name)
        held = (await trainer.uploaded(version, {name: data})).get(name, -1)
        if held < len(data):
            offsets = range(max(held, 0), len(data), 200_000)
            await trainer.upload(trainer.part(version, name, data, o, o + 200_000) for o in offsets)
        await trainer.announce(version, {name: data})
        await asyncio.sleep(0.05)  # the next bucket is gathered
    note("commit")
    await trainer.commit(version, describe(files))
    note("committed")


async def _publish_all(address: str, epoch: int, first: int, progress: Path) -> None:
    async with grpc.aio.insecure_channel(address, options=CHANNEL) as channel:
        trainer = Trainer(stub=async_stub(WeightServiceStub, channel), run_id=RUN, epoch=epoch)
        for step in itertools.count(first):
            while True:
                try:
                    await _publish(trainer, step, progress)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)


def main() -> None:
    """Arguments: address of the weights service, epoch, first step, file of the progress."""
    address, epoch, first, progress = sys.argv[1:]
    asyncio.run(_publish_all(address, int(epoch), int(first), Path(progress)))


if __name__ == "__main__":
    main()
