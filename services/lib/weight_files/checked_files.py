"""What this process knows of the content of files, so that it reads none twice."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

_KNOWN = 20_000
"""Files of two versions of the largest number of files."""
_RECEIVING = 64
"""Files on their way whose bytes are hashed as they arrive; those of more are read again."""

_Inode = tuple[int, int]
_Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The bytes of a file that were hashed while they were received."""

    num_bytes: int
    digest: hashlib._Hash


class CheckedFiles:
    """SHA-256 of files by inode, size and time of change, and of prefixes of files on their way.

    Only in memory: another process, and the next life of this one, read a file again. A file that
    is written to without a change of its size and of its time, which counts in ticks of the kernel
    (4 ms), is not noticed here; rollout servers check the sum too.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[_Inode, tuple[_Stamp, str]] = OrderedDict()
        self._receiving: OrderedDict[Path, _Prefix] = OrderedDict()
        self._lock = threading.Lock()

    def digest(self, file: BufferedReader) -> str:
        """SHA-256 of an open file, which is read unless it is known. Raises `OSError`."""
        inode, stamp = _identity(file.fileno())
        with self._lock:
            known = self._known.get(inode)
        if known is not None and known[0] == stamp:
            return known[1]
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if _identity(file.fileno()) == (inode, stamp):  # else it was written to meanwhile
            self._remember(inode, stamp, sha256)
        return sha256

    def append(self, path: Path, descriptor: int, offset: int, data: memoryview | bytes) -> None:
        """Write `data` at the end of an open file, which is at `offset`, and hash it.

        Raises `OSError`, after which a part may be written, which is not hashed.
        """
        rest, place = memoryview(data), offset
        while rest:
            written = os.pwrite(descriptor, rest, place)
            rest, place = rest[written:], place + written
        prefix = self._receiving.get(path) if offset else _Prefix(0, hashlib.sha256())
        if prefix is None or prefix.num_bytes != offset:
            return
        prefix.digest.update(data)
        inode, stamp = _identity(descriptor)
        self._remember(inode, stamp, prefix.digest.hexdigest())
        with self._lock:
            self._receiving[path] = _Prefix(offset + len(data), prefix.digest)
            self._receiving.move_to_end(path)
            if len(self._receiving) > _RECEIVING:
                self._receiving.popitem(last=False)

    def _remember(self, inode: _Inode, stamp: _Stamp, sha256: str) -> None:
        with self._lock:
            self._known[inode] = stamp, sha256
            self._known.move_to_end(inode)
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)


def _identity(descriptor: int) -> tuple[_Inode, _Stamp]:
    found = os.fstat(descriptor)
    return (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns)
