"""A publisher as a process of its own, which a test may kill.

python -m tests.system.trainer.publish.publishing PORT RUN_ID FOLDER EPOCH
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seamflow.channel import connect

from bench.rollout.held_weights import held_weights
from services.lib.weight_files.shard_chunks import encode_upload
from tests.lib.trainer.support import make_model
from trainer.publish import uploader
from trainer.publish.publisher import Publisher

NUM_WEIGHTS = 6 << 20
"""24 MiB in float32: 25 parts."""


def big_weights() -> dict[str, torch.Tensor]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(7)
    return {"weight": torch.randn(NUM_WEIGHTS, generator=generator)}


class SentBytes:
    """Counts the bytes of files that uploads of this process send, and may change them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        self.num_parts = 0
        self.change: Callable[[Any, bytes], bytes | None] = lambda head, data: None
        """Given a message and its data: another encoding of it, or None."""
        monkeypatch.setattr(uploader, "encode_upload", self._encode)

    def _encode(self, head: Any, data: bytes) -> bytes:
        self.num_bytes += len(data)
        self.num_parts += 1
        return self.change(head, data) or encode_upload(head, data)


async def _main(port: int, run_id: str, folder: Path, epoch: int) -> None:
    model = make_model(folder / "model")
    async with connect(f"127.0.0.1:{port}") as channel:
        await Publisher(channel, run_id, model, folder / "upload").publish(
            held_weights(big_weights()), step=1, parent=0, epoch=epoch
        )


def _slow(head: Any, data: bytes) -> bytes:
    time.sleep(0.1)
    return encode_upload(head, data)


if __name__ == "__main__":
    pytest.MonkeyPatch().setattr(uploader, "encode_upload", _slow)
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
