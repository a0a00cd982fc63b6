"""The part of `bench/rollout/weights.py` that publishes as a trainer does."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from seamflow.channel import connect

from bench.rollout.held_weights import held_weights
from trainer.publish.publisher import Publisher

_RUN = "bench-publish"
_NUM_TENSORS = 16


async def publish_seconds(
    port: int, folder: Path, rounds: int, mebibytes: int
) -> tuple[list[float], list[float]]:
    """Seconds from the weights on the host to their commit: shared folder, rpc; in turns.

    Both end durable on the disk of the weights service at `port`, which is this machine's.
    """
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    generator = torch.Generator().manual_seed(0)
    size = mebibytes * 2**20 // 4 // _NUM_TENSORS
    tensors = {f"w{n}": torch.randn(size, generator=generator) for n in range(_NUM_TENSORS)}
    shared: list[float] = []
    uploaded: list[float] = []
    async with connect(f"127.0.0.1:{port}") as channel:
        for number in range(2 * rounds):
            find_folder, samples = (True, shared) if number % 2 == 0 else (False, uploaded)
            upload = folder / "upload"
            publisher = Publisher(channel, _RUN, model, upload, find_folder=find_folder)
            begin = time.perf_counter()
            await publisher.publish(held_weights(tensors), step=number + 1, parent=number, epoch=1)
            samples.append(time.perf_counter() - begin)
    return shared, uploaded
