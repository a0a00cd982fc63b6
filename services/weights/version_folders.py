"""Version folders on disk: paths, verification, reading and deletion.

All disk access runs in threads; names are validated by the caller.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
from seamflow.weights.v1.weight_service_pb2 import FolderProbe, WeightFile

from services.chassis.errors import (
    Reason,
    ServiceError,
    exhausted,
    failed_precondition,
    unavailable,
)
from services.lib.weight_files.checked_files import CheckedFiles
from services.lib.weight_files.folder_names import (
    folder_name,
    open_regular,
    own_probe,
    sees,
    versions_in,
)
from services.lib.weight_files.shard_chunks import OpenShard
from services.weights.keys import Scope

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_RETRY_SECONDS = 30.0
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV})


class WeightFolders:
    """`<root>/<run>/<model>/weight_v000001/`: one flat folder per version.

    A trainer that sees the folder writes the files there; the files of another one are uploaded.
    Raises ServiceErrors: RESOURCE_EXHAUSTED for a full disk, UNAVAILABLE for a failing one; for
    a file that does not match, FAILED_PRECONDITION before the commit and DATA_LOSS after it.
    """

    def __init__(self, root: Path) -> None:
        """`root` is created by the first publish."""
        self._root = root.resolve()
        self._readers: Counter[tuple[Scope, int]] = Counter()
        self._checked = CheckedFiles()

    def path(self, scope: Scope, version: int) -> Path:
        return self._of(scope) / folder_name(version)

    async def make(self, scope: Scope, version: int) -> Path:
        folder = self.path(scope, version)
        with _disk_errors(f"create {folder}"):
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        return folder

    async def highest(self, scope: Scope) -> int:
        """The highest version that has a folder, committed or not; 0 for none."""
        return max(await self._present(scope), default=0)

    async def probe(self, scope: Scope, version: int) -> FolderProbe:
        """The probe in the folder of `version`, for readers and writers of the folder."""
        folder = await self.make(scope, version)
        with _disk_errors(f"write a probe into {folder}"):
            return await asyncio.to_thread(own_probe, folder)

    async def sees(self, scope: Scope, version: int, probe: FolderProbe) -> bool:
        """Whether a caller's probe is in the folder of `version`."""
        return await asyncio.to_thread(sees, self.path(scope, version), probe)

    async def uploaded(self, scope: Scope, file: WeightFile) -> int | None:
        """Number of uploaded bytes of `file`; None if there is none, not even an empty file."""
        with _disk_errors(f"read the upload of {file.name!r}"):
            return await asyncio.to_thread(self._uploads(scope).held, file)

    async def receive(
        self, scope: Scope, file: WeightFile, offset: int, data: Callable[[], bytes | memoryview]
    ) -> int:
        """Store `data()` at `offset` of an uploaded file; returns the number of bytes held then."""
        uploads = self._uploads(scope)
        with _disk_errors(f"write the upload of {file.name!r}"):
            return await asyncio.to_thread(lambda: uploads.write(file, offset, data()))

    async def verify(self, scope: Scope, version: int, files: Sequence[WeightFile]) -> None:
        """Check size and SHA-256 of every file, take uploaded ones in, and make all durable.

        A file is read once, also if `offer` has checked it. Unless every file is right, uploaded
        ones stay where they are, to be continued.
        """
        folder, uploads = self.path(scope, version), self._uploads(scope)
        uploaded = await self._check(scope, folder, files)
        with _disk_errors(f"move files to {folder}"):
            await asyncio.to_thread(_take_in, uploads, folder, uploaded)
        with _disk_errors(f"sync {folder}"):
            await asyncio.to_thread(_sync_folder, folder)

    async def offer(self, scope: Scope, version: int, files: Sequence[WeightFile]) -> None:
        """Check files before their commit, and have uploaded ones in the folder of `version` too.

        They stay where they are as well: a trainer that is restarted commits them under another
        version.
        """
        folder, uploads = self.path(scope, version), self._uploads(scope)
        uploaded = await self._check(scope, folder, files)
        with _disk_errors(f"link files into {folder}"):
            await asyncio.to_thread(_link_in, uploads, folder, uploaded)

    async def _check(
        self, scope: Scope, folder: Path, files: Sequence[WeightFile]
    ) -> list[WeightFile]:
        """Check every file; returns those that are uploaded."""
        check = partial(_check, self._uploads(scope), folder, self._checked)
        uploaded = await asyncio.gather(*(asyncio.to_thread(check, file) for file in files))
        return [file for file, is_uploaded in zip(files, uploaded, strict=True) if is_uploaded]

    @contextmanager
    def reading(self, scope: Scope, version: int) -> Iterator[Path]:
        """The folder of `version`, protected from deletion within the context."""
        self._readers[scope, version] += 1
        try:
            yield self.path(scope, version)
        finally:
            self._readers[scope, version] -= 1
            self._readers += Counter()  # drops the zeros

    async def open(self, scope: Scope, version: int, file: WeightFile) -> OpenShard:
        """Open a file that is committed or offered."""
        folder = self.path(scope, version)
        where = f"file {file.name!r} in {folder}"
        for path in (folder / file.name, self._uploads(scope).path(file)):
            with _disk_errors(f"read {where}"), suppress(FileNotFoundError):
                opened = await asyncio.to_thread(open_regular, path)
                return OpenShard(described=file, file=opened)
        raise _lost(f"{where} is gone")

    async def prune(self, scope: Scope, oldest: int) -> None:
        """Delete every version below `oldest` that is not being read, and unfinished uploads."""
        for version in await self._present(scope):
            if version < oldest and not self._readers[scope, version]:
                folder = self.path(scope, version)
                with _disk_errors(f"delete {folder}"):
                    await asyncio.to_thread(shutil.rmtree, folder)
        with _disk_errors(f"delete the uploads of {self._of(scope)}"):
            await asyncio.to_thread(self._uploads(scope).clear)

    def _of(self, scope: Scope) -> Path:
        return self._root / scope.run_id / scope.model

    def _uploads(self, scope: Scope) -> Uploads:
        return Uploads(self._of(scope), self._checked)

    async def _present(self, scope: Scope) -> list[int]:
        with _disk_errors(f"list {self._of(scope)}"):
            return await asyncio.to_thread(versions_in, self._of(scope))


def _check(uploads: Uploads, folder: Path, checked: CheckedFiles, file: WeightFile) -> bool:
    """Check a file that is uploaded (True) or was written into `folder` (False)."""
    where = f"file {file.name!r} in {folder}"
    with _disk_errors(f"check {where}"):
        held = uploads.held(file)
        if held == file.num_bytes and _is_whole(uploads, checked, file):
            return True
        if held is not None and not (folder / file.name).exists():
            message = (
                f"file {file.name!r} has {held} of {file.num_bytes} bytes; "
                "ask GetUpload, upload the rest, and commit again"
            )
            raise failed_precondition(Reason.INCOMPLETE_PUBLISH, message)
        _verify(folder / file.name, checked, file, where)
        return False


def _is_whole(uploads: Uploads, checked: CheckedFiles, file: WeightFile) -> bool:
    """Check an uploaded file; False: a repeated commit has moved it."""
    try:
        _verify(uploads.path(file), checked, file, f"uploaded file {file.name!r}")
    except ServiceError as error:
        if uploads.held(file) is None:
            return False
        if error.reason == Reason.CHECKSUM_MISMATCH:
            uploads.drop(file)  # or it could never be uploaded again
        raise
    return True


def _take_in(uploads: Uploads, folder: Path, files: Sequence[WeightFile]) -> None:
    """Move uploaded files, which are checked, into `folder`."""
    for file in files:
        # A repeated commit may have moved it.
        with suppress(FileNotFoundError):
            uploads.path(file).replace(folder / file.name)


def _link_in(uploads: Uploads, folder: Path, files: Sequence[WeightFile]) -> None:
    """Link uploaded files, which are checked, into `folder`, if its file system has links."""
    for file in files:
        linked = folder / f".{file.name}.{file.sha256}"
        linked.unlink(missing_ok=True)
        try:
            # Missing: a commit has moved it, or another call has been faster.
            with suppress(FileNotFoundError):
                os.link(uploads.path(file), linked)
                linked.replace(folder / file.name)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        linked.unlink(missing_ok=True)  # left by the rename if both are one file


def _verify(path: Path, checked: CheckedFiles, expected: WeightFile, where: str) -> None:
    try:
        file = open_regular(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
            message = f"{where} is missing or not a regular file"
            raise failed_precondition(Reason.INCOMPLETE_PUBLISH, message) from error
        raise
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.num_bytes:
            message = f"{where} has {size} bytes instead of {expected.num_bytes}"
            raise failed_precondition(Reason.INCOMPLETE_PUBLISH, message)
        if checked.digest(file) != expected.sha256:
            message = f"{where} does not have the SHA-256 of the manifest"
            raise failed_precondition(Reason.CHECKSUM_MISMATCH, message)
        # Cheap if the trainer has already synced it.
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the folder's entries durable, and its own entry in its parent."""
    for path in (folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lost(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.DATA_LOSS, Reason.INCOMPLETE_PUBLISH, message)


@contextmanager
def _disk_errors(operation: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot {operation}: {error.strerror or error}"
        if error.errno in _FULL:
            cure = f"{message}; free space, or lower keep_versions"
            raise exhausted(Reason.STORE_FULL, cure, _FULL_RETRY_SECONDS) from error
        raise unavailable(Reason.STORE_UNAVAILABLE, message) from error


_UPLOADS = "uploads"


class Uploads:
    """The uploaded files of one model of a run; all methods block, and raise `OSError`."""

    def __init__(self, folder: Path, checked: CheckedFiles) -> None:
        """`folder` is the model's; it is created by the first write. `checked` hashes the bytes."""
        self._folder = folder / _UPLOADS
        self._checked = checked

    def path(self, file: WeightFile) -> Path:
        """Where the bytes of `file` are, if there are any."""
        return self._folder / f"{file.name}.{file.sha256}"

    def held(self, file: WeightFile) -> int | None:
        """Number of bytes of `file`; None: not even an empty file."""
        try:
            return self.path(file).stat().st_size
        except FileNotFoundError:
            return None

    def write(self, file: WeightFile, offset: int, data: bytes | memoryview) -> int:
        """Append what is new of `data` at `offset`; returns the number of bytes held then.

        Raises:
            ServiceError: FAILED_PRECONDITION (OFFSET_GAP): bytes before `offset` are missing.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path(file), flags, 0o644)
        try:
            # Or two writers could hash one's bytes and store the other's.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = os.fstat(descriptor).st_size
            if offset > held:
                raise _gap(file, offset, held)
            new = memoryview(data)[held - offset :]
            self._checked.append(self.path(file), descriptor, held, new)
            return held + len(new)
        finally:
            os.close(descriptor)

    def drop(self, file: WeightFile) -> None:
        self.path(file).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all files. A writer of one of them is told to begin again."""
        if self._folder.exists():
            shutil.rmtree(self._folder)


def _gap(file: WeightFile, offset: int, held: int) -> Exception:
    message = (
        f"file {file.name!r}: the part at byte {offset} follows {held} bytes; "
        "ask GetUpload and continue there"
    )
    return failed_precondition(Reason.OFFSET_GAP, message)
