"""Publishes files as a weight version, without a trainer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from trainer.publish.uploader import Uploader


async def publish_files(
    channel: grpc.aio.Channel, run_id: str, step: int, files: Sequence[Path]
) -> int:
    """Hash, upload and commit files of one folder; the version they are.

    Args:
        channel: to the weights service.
        run_id: of the version.
        step: that it is of; another one for each version.
        files: all of the version's.
    """
    described = [await asyncio.to_thread(_described, file) for file in files]
    stub: Any = WeightServiceStub(channel)
    run: dict[str, Any] = {"run_id": run_id, "epoch": 1}
    begin = pb.BeginPublishRequest(**run, step=step, request_id=f"step-{step}")
    run["weight_version"] = (await stub.BeginPublish(begin)).weight_version
    await Uploader(channel).upload(pb.UploadShardsRequest(**run), files[0].parent, described)
    await stub.CommitPublish(pb.CommitPublishRequest(**run, files=described))
    return int(run["weight_version"])


def _described(path: Path) -> pb.WeightFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return pb.WeightFile(name=path.name, num_bytes=path.stat().st_size, sha256=digest)
