"""How weights come to a rollout server: one protocol, and the errors of everything behind it.

WeightsError                 of `rollout.server.engines.engine`: these weights cannot be loaded
└── TransferError            a transport failed; the next one goes on from what is verified
    ├── DamagedChunk         a chunk is not what was sent; it alone is fetched again
    ├── DamagedFile          a whole file is not the manifest's; it alone is fetched again
    ├── SourceLost           whoever sent went away, has not got it, or stalls
    ├── NotVisible           the publisher's folder cannot be seen from here
    └── PhaseTimeout         a fetch took longer than its deadline
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from google.protobuf import json_format
from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from rollout.server.engines.engine import WeightsError

__all__ = [
    "MANIFEST",
    "DamagedChunk",
    "DamagedFile",
    "Incoming",
    "LocalVersion",
    "NotVisible",
    "PhaseTimeout",
    "SourceLost",
    "TransferError",
    "WeightTransport",
    "for_each_missing",
]

MANIFEST = "manifest.json"
_ARRIVING = ".part"


class TransferError(WeightsError):
    """A transport failed.

    Attributes:
        transport: which one, by name.
        cure: what to do about it.
        file: which file, if one; `offset`: at which of its bytes; `chunk`: in which chunk.
    """

    def __init__(
        self,
        what: str,
        *,
        transport: str,
        cure: str,
        file: str = "",
        chunk: int | None = None,
        offset: int | None = None,
    ) -> None:
        self.transport, self.cure = transport, cure
        self.file, self.chunk, self.offset = file, chunk, offset
        place = f" {file}" if file else ""
        place += "" if chunk is None else f", chunk {chunk}"
        place += "" if offset is None else f", byte {offset}"
        super().__init__(f"{transport}{place}: {what}; {cure}")


class DamagedChunk(TransferError):  # noqa: N818 -- names the event
    """A chunk whose checksum, encoding or place is wrong."""


class DamagedFile(TransferError):  # noqa: N818 -- names the event
    """A file whose size or SHA-256 is not the manifest's."""


class SourceLost(TransferError):  # noqa: N818 -- names the event
    """The sender went away, refused, or sends nothing."""


class NotVisible(TransferError):  # noqa: N818 -- names the event
    """The publisher's folder does not show the version here."""


class PhaseTimeout(TransferError):  # noqa: N818 -- names the event
    """A phase of an update took longer than it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalVersion:
    """A whole version on this machine's disk."""

    manifest: Manifest
    """What it is."""
    folder: Path
    """Its files, as published."""

    @classmethod
    def read(cls, folder: Path) -> LocalVersion | None:
        """The version in `folder`; None: there is none that this release wrote."""
        try:
            manifest = json_format.Parse((folder / MANIFEST).read_text(), Manifest())
        except (OSError, json_format.ParseError):
            return None
        return cls(manifest=manifest, folder=folder)

    def file(self, name: str) -> WeightFile | None:
        """The file of that name."""
        return next((file for file in self.manifest.files if file.name == name), None)


class Incoming:
    """One version on its way: what of it is here, verified, and who waits for more.

    A file grows as `<name>.part`, its verified beginning only, and gets its name once whole. So a
    killed server finds after its restart what it had, without a journal, and hashes it again.
    """

    def __init__(self, manifest: Manifest, folder: Path, base: LocalVersion | None) -> None:
        """`folder` exists; `base` is a version to make deltas against."""
        self.manifest = manifest
        self.folder = folder
        self.base = base
        self.received_bytes = 0
        """Bytes of data that came over a network for it."""
        self._verified: dict[str, int] = {}
        self._grew: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        for file in manifest.files:
            self._verified[file.name] = self._on_disk(file)

    @property
    def missing(self) -> Sequence[WeightFile]:
        """Files that are not whole yet."""
        return [file for file in self.manifest.files if not self.path(file).exists()]

    def path(self, file: WeightFile) -> Path:
        """Where the whole file belongs."""
        return self.folder / file.name

    def part(self, file: WeightFile) -> Path:
        """Where its verified beginning is."""
        return self.folder / f"{file.name}{_ARRIVING}"

    def verified(self, file: WeightFile) -> int:
        """Bytes of its beginning that are here."""
        return self._verified[file.name]

    def advance(self, file: WeightFile, num_bytes: int) -> None:
        """Tell that so much of its beginning is in `part` now."""
        self._verified[file.name] = num_bytes
        grew, self._grew[file.name] = self._grew[file.name], asyncio.Event()
        grew.set()

    def complete(self, file: WeightFile) -> None:
        """Tell that `part` is whole and checked against the manifest."""
        self.part(file).rename(self.path(file))
        self.advance(file, file.num_bytes)

    def drop(self, file: WeightFile) -> None:
        """Forget what is here of it."""
        self.part(file).unlink(missing_ok=True)
        self.advance(file, 0)

    async def beyond(self, file: WeightFile, offset: int) -> int:
        """Wait until more than `offset` bytes are here; how many."""
        while self._verified[file.name] <= offset:
            await self._grew[file.name].wait()
        return self._verified[file.name]

    def _on_disk(self, file: WeightFile) -> int:
        whole, part = self.path(file), self.part(file)
        if whole.exists():
            # Nothing is fsynced: what was whole may have lost bytes with its machine. It counts
            # as arriving, so that it is hashed again.
            whole.rename(part)
        if not part.exists():
            return 0
        if (size := part.stat().st_size) <= file.num_bytes:
            return size
        part.unlink()
        return 0


async def for_each_missing(
    incoming: Incoming, at_once: int, bring: Callable[[WeightFile], Awaitable[None]]
) -> None:
    """Call `bring` for every missing file, a few at once. Raises the first failure of one."""
    places = asyncio.Semaphore(at_once)

    async def in_turn(file: WeightFile) -> None:
        async with places:
            await bring(file)

    try:
        async with asyncio.TaskGroup() as tasks:
            for file in incoming.missing:
                tasks.create_task(in_turn(file))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


class WeightTransport(Protocol):
    """Brings the files of a version here. The door for RDMA and the like.

    A plug-in "package.module:Name" is called as `Name(context)` with a
    `rollout.server.weights.transports.TransportContext`.
    """

    async def fetch(self, incoming: Incoming) -> None:
        """Complete every missing file of `incoming`, checked against its manifest.

        Keep what is verified already. Raises `TransferError`; then the next transport goes on.
        Cancelled when the deadline of the phase passes.
        """
        ...
