"""Finds out whether the weights service's folder of a version is this machine's too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seamflow.weights.v1 import weight_service_pb2 as pb

from services.chassis.rpc.retries import retry_forever
from services.lib.weight_files.folder_probe import sees, write_probe

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The weights service's folder of a version, which this machine sees."""

    path: Path
    probe: pb.FolderProbe
    """In it, by which another machine finds out."""


async def shared_folder(
    stub: WeightServiceAsyncStub, run_id: str, weight_version: int
) -> SharedFolder | None:
    """The version's folder, if both sides read what the other one wrote there; else None."""
    request = pb.ProbeFolderRequest(run_id=run_id, weight_version=weight_version)
    offer = await retry_forever("ProbeFolder", lambda: stub.ProbeFolder(request))
    folder = Path(offer.folder)
    if not offer.folder or not await asyncio.to_thread(sees, folder, offer.probe):
        return None
    try:
        written = await asyncio.to_thread(write_probe, folder)
    except OSError:
        return None  # it can be read only
    request.written.CopyFrom(written)
    try:
        answer = await retry_forever("ProbeFolder", lambda: stub.ProbeFolder(request))
    finally:
        (folder / written.name).unlink(missing_ok=True)
    return SharedFolder(folder, offer.probe) if answer.seen else None
