"""Links files of the weights service's folder, if this machine sees it; nothing is copied."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.weights.v1.weight_service_pb2 import Manifest, ProbeFolderRequest, WeightFile
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.weights.transport import DamagedFile, Incoming, NotVisible
from rollout.server.weights.transports import TransportContext
from services.lib.weight_files.folder_names import sees

_NAME = "shared_folder"
_CURE = "mount it here under the same path, or let the next transport fetch the files"


class SharedFolder:
    """Links the files of a version into the cache.

    The weights service names their folder; it is the same one here if the service's probe is in it.
    Hard links, so that a version in use survives its deletion by the service; symbolic links if
    the cache is on another file system.
    """

    def __init__(self, context: TransportContext) -> None:
        self._stub = async_stub(WeightServiceStub, context.weights)

    async def fetch(self, incoming: Incoming) -> None:
        """Link all missing files. Raises `NotVisible` or `DamagedFile`."""
        source = await self._source(incoming.manifest)
        for file in incoming.missing:
            path, part = source / file.name, incoming.part(file)
            with self._visible(path, file):
                await asyncio.to_thread(self._check, path, file)
                # Not in the thread, which may outlive this call: another transport must never
                # write into the published file.
                part.unlink(missing_ok=True)
                _link(path, part)
            incoming.complete(file)

    async def _source(self, manifest: Manifest) -> Path:
        """The folder of the version, if it is visible here."""
        request = ProbeFolderRequest(
            run_id=manifest.run_id, model=manifest.model, weight_version=manifest.weight_version
        )
        offer = await retrying(lambda: self._stub.ProbeFolder(request))
        folder = Path(offer.folder)
        if not offer.folder:
            what = "the weights service offers no folder (offer_folder)"
        elif await asyncio.to_thread(sees, folder, offer.probe):
            return folder
        else:
            what = f"{folder} of the weights service is not on this machine"
        raise NotVisible(what, transport=_NAME, cure=_CURE)

    @contextmanager
    def _visible(self, source: Path, file: WeightFile) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"{source}: {error.strerror}"
            raise NotVisible(what, transport=_NAME, cure=_CURE, file=file.name) from error

    def _check(self, source: Path, file: WeightFile) -> None:
        size = source.stat(follow_symlinks=False).st_size
        cure = "publish again, or find the other process that writes there"
        if size != file.num_bytes:
            what = f"{source} has {size} bytes, the manifest has {file.num_bytes}"
            raise DamagedFile(what, transport=_NAME, cure=cure, file=file.name)
        with source.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != file.sha256:
            what = f"the SHA-256 of {source} is not the manifest's"
            raise DamagedFile(what, transport=_NAME, cure=cure, file=file.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        target.symlink_to(source.absolute())
