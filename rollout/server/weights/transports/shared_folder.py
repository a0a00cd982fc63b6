"""Links files of the publisher's folder, where it is mounted on this machine; nothing is copied."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from rollout.server.weights.transport import DamagedFile, Incoming, NotVisible
from rollout.server.weights.transports import TransportContext
from services.lib.weight_files.folder_names import folder_name

__all__ = ["SharedFolder"]

_NAME = "shared_folder"


class SharedFolder:
    """Links `<weight_folder>/<run>/<model>/weight_v000001/*` into the cache.

    Hard links, so that a version in use survives its deletion by the publisher; symbolic links if
    the cache is on another file system. `weight_folder_check` is "size" (the weights service has
    verified the SHA-256 on this file system) or "sha256" (read the whole file).
    """

    def __init__(self, context: TransportContext) -> None:
        assert context.config.weight_folder is not None
        self._root = context.config.weight_folder
        self._check_digest = context.config.weight_folder_check == "sha256"

    async def fetch(self, incoming: Incoming) -> None:
        """Link all missing files. Raises `NotVisible` or `DamagedFile`."""
        source = _folder(self._root, incoming.manifest)
        for file in incoming.missing:
            path, part = source / file.name, incoming.part(file)
            with self._visible(path, file):
                await asyncio.to_thread(self._check, path, file)
                # Not in the thread, which may outlive this call: another transport must never
                # write into the published file.
                part.unlink(missing_ok=True)
                _link(path, part)
            incoming.complete(file)

    @contextmanager
    def _visible(self, source: Path, file: WeightFile) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            cure = f"mount the weights service's folder at weight_folder {self._root}"
            what = f"{source}: {error.strerror}"
            raise NotVisible(what, transport=_NAME, cure=cure, file=file.name) from error

    def _check(self, source: Path, file: WeightFile) -> None:
        size = source.stat(follow_symlinks=False).st_size
        cure = "publish again, or find the other process that writes there"
        if size != file.num_bytes:
            what = f"{source} has {size} bytes, the manifest has {file.num_bytes}"
            raise DamagedFile(what, transport=_NAME, cure=cure, file=file.name)
        if self._check_digest:
            with source.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != file.sha256:
                what = f"the SHA-256 of {source} is not the manifest's"
                raise DamagedFile(what, transport=_NAME, cure=cure, file=file.name)


def _folder(root: Path, manifest: Manifest) -> Path:
    return root / manifest.run_id / manifest.model / folder_name(manifest.weight_version)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        target.symlink_to(source.absolute())
