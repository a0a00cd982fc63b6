"""The protocol of weight transports, their errors, and the state of an arriving version.

WeightsError                 of `rollout.server.engines.engine`: these weights cannot be loaded
└── TransferError            a transport failed; the next one continues from what is verified
    ├── DamagedChunk         a chunk arrived damaged; only it is fetched again
    ├── DamagedFile          a complete file differs from the manifest; only it is fetched again
    ├── SourceLost           the sender disconnected, lacks the file, or stalls
    ├── NotVisible           this machine does not see the weights service's folder
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
from services.lib.weight_files.checked_files import CheckedFiles

MANIFEST = "manifest.json"
_ARRIVING = ".part"


class TransferError(WeightsError):
    """A transport failed.

    Attributes:
        transport: name of the transport.
        cure: what to do about it.
        file: name of the file, or empty; `offset`: byte in it; `chunk`: its chunk.
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
    """A chunk whose checksum, encoding or offset is wrong."""


class DamagedFile(TransferError):  # noqa: N818 -- names the event
    """A file whose size or SHA-256 is not the manifest's."""


class SourceLost(TransferError):  # noqa: N818 -- names the event
    """The sender disconnected, returned an error, or stalls."""


class NotVisible(TransferError):  # noqa: N818 -- names the event
    """This machine does not see the version in the weights service's folder."""


class PhaseTimeout(TransferError):  # noqa: N818 -- names the event
    """A phase of an update exceeded its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalVersion:
    """A complete version on this machine's disk."""

    manifest: Manifest
    folder: Path
    """Its files, as published."""

    @classmethod
    def read(cls, folder: Path) -> LocalVersion | None:
        """Read the version in `folder`; None: there is no valid manifest."""
        try:
            text = (folder / MANIFEST).read_text()
            manifest = json_format.Parse(text, Manifest(), ignore_unknown_fields=True)
        except (OSError, json_format.ParseError):
            return None
        return cls(manifest=manifest, folder=folder)

    def file(self, name: str) -> WeightFile | None:
        """The file named `name`; None: there is none."""
        return next((file for file in self.manifest.files if file.name == name), None)


class Incoming:
    """An arriving version: the verified bytes of each file, and the tasks that wait for more.

    `<name>.part` holds the verified prefix of a file and is renamed once complete. So a killed
    server continues after its restart without a journal, after hashing the prefix again.
    """

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        """`folder` must exist."""
        self.manifest = manifest
        self.folder = folder
        self.received_bytes = 0
        self.checked = CheckedFiles()
        """Hashes the files as they are written."""
        self._verified: dict[str, int] = {}
        self._grew: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        for file in manifest.files:
            self._verified[file.name] = self._on_disk(file)

    def expect(self, manifest: Manifest) -> None:
        """Take a later list of the version's files; what differs from the earlier is dropped."""
        same = {file.name for file in self.manifest.files if file in manifest.files}
        for file in self.manifest.files:
            if file.name not in same:
                self.path(file).unlink(missing_ok=True)
                self.drop(file)
        self.manifest = manifest
        for file in manifest.files:
            self._verified.setdefault(file.name, 0)

    @property
    def verified_bytes(self) -> int:
        return sum(self._verified[file.name] for file in self.manifest.files)

    @property
    def missing(self) -> Sequence[WeightFile]:
        return [file for file in self.manifest.files if not self.path(file).exists()]

    @property
    def complete_paths(self) -> Sequence[Path]:
        return [path for file in self.manifest.files if (path := self.path(file)).exists()]

    def path(self, file: WeightFile) -> Path:
        return self.folder / file.name

    def part(self, file: WeightFile) -> Path:
        """Path of the verified prefix."""
        return self.folder / f"{file.name}{_ARRIVING}"

    def verified(self, file: WeightFile) -> int:
        """Length of the verified prefix in bytes."""
        return self._verified[file.name]

    def advance(self, file: WeightFile, num_bytes: int) -> None:
        """Set the length of the verified prefix in `part`."""
        self._verified[file.name] = num_bytes
        grew, self._grew[file.name] = self._grew[file.name], asyncio.Event()
        grew.set()

    def complete(self, file: WeightFile) -> None:
        """Rename `part`, which is complete and equals the manifest's file."""
        self.part(file).rename(self.path(file))
        self.advance(file, file.num_bytes)

    def drop(self, file: WeightFile) -> None:
        """Delete the verified prefix."""
        self.part(file).unlink(missing_ok=True)
        self.advance(file, 0)

    async def beyond(self, file: WeightFile, offset: int) -> int:
        """Wait until more than `offset` bytes are verified; returns their number."""
        while self._verified[file.name] <= offset:
            await self._grew[file.name].wait()
        return self._verified[file.name]

    def _on_disk(self, file: WeightFile) -> int:
        whole, part = self.path(file), self.part(file)
        if whole.exists():
            # Without fsync, a complete file may have lost bytes in a crash of the machine: treat it
            # as arriving, so that it is hashed again.
            whole.rename(part)
        if not part.exists():
            return 0
        if (size := part.stat().st_size) <= file.num_bytes:
            return size
        part.unlink()
        return 0


async def for_each_missing(
    incoming: Incoming,
    limit: int,
    fetch: Callable[[WeightFile], Awaitable[None]],
    sender: Callable[[WeightFile], str] = lambda _: "",
) -> None:
    """Call `fetch` for each missing file, `limit` of a sender's concurrently, in order.

    Raises the first failure.
    """
    slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(limit))

    async def in_turn(file: WeightFile) -> None:
        async with slots[sender(file)]:
            await fetch(file)

    try:
        async with asyncio.TaskGroup() as tasks:
            for file in incoming.missing:
                tasks.create_task(in_turn(file))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


class WeightTransport(Protocol):
    """Fetches the files of a version; the plug-in point for RDMA and similar.

    A plug-in "package.module:Name" is called as `Name(context)` with a
    `rollout.server.weights.transports.TransportContext`.
    """

    async def fetch(self, incoming: Incoming) -> None:
        """Complete every missing file of `incoming`, checked against its manifest.

        Keep what is verified already. Raises `TransferError`; then the next transport continues.
        Cancelled when the deadline of the phase passes.
        """
        ...
