"""Folders of weight versions: their names and fingerprints, and how two processes find one.

A probe is a small file with a random content; who reads it sees the folder of who wrote it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import secrets
import stat
from pathlib import Path

from seamflow.weights.v1.weight_service_pb2 import FolderProbe

MODEL_NAME = "policy"
"""Of the trained model at the weights service, which can keep models of other names beside it."""
ADAPTER_BASE = "base.json"
"""File of an adapter's folder: {"fingerprint": of the weights that it is added to}."""
COPIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Suffixes of a model folder's configuration and tokenizer files: no weights, no code."""
_PREFIX = "weight_v"
_PIECES, _PIECE_BYTES = 256, 1 << 14


def folder_name(weight_version: int) -> str:
    """`weight_v000012`."""
    return f"{_PREFIX}{weight_version:06d}"


def fingerprint(folder: Path) -> str:
    """A fingerprint of a model folder's weights that does not read all of them.

    A digest of the names and sizes of the safetensors files, and of samples of each.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(piece * max(size - _PIECE_BYTES, 0) // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def versions_in(folder: Path, suffix: str = "") -> list[int]:
    """Versions that have a folder of that name and `suffix` in `folder`, in order."""
    names = {path.name for path in folder.glob(f"{_PREFIX}*{suffix}") if not path.is_symlink()}
    numbers = {name.removeprefix(_PREFIX).removesuffix(suffix) for name in names}
    found = sorted(int(number) for number in numbers if number.isascii() and number.isdigit())
    return [version for version in found if folder_name(version) + suffix in names]


CONTENT_BYTES = 64
"""Most bytes of a probe's content."""
PROBE_NAME = re.compile(r"\.probe(-[0-9a-f]{32})?")
"""Names of probes; no weight file begins with a dot."""
_OWN = ".probe"
_RANDOM_BYTES = 32


def own_probe(folder: Path) -> FolderProbe:
    """The probe of the folder's owner, made by the first call. Raises `OSError`."""
    path = folder / _OWN
    if not path.exists():
        made = write_probe(folder)
        # The first of several replicas names it; a reader never sees a part of it.
        try:
            os.link(folder / made.name, path)
        except FileExistsError:
            pass
        finally:
            (folder / made.name).unlink()
    return FolderProbe(name=_OWN, content=path.read_bytes())


def write_probe(folder: Path) -> FolderProbe:
    """Write a new probe into `folder`; delete it after use. Raises `OSError`."""
    probe = FolderProbe(
        name=f"{_OWN}-{secrets.token_hex(16)}", content=secrets.token_bytes(_RANDOM_BYTES)
    )
    (folder / probe.name).write_bytes(probe.content)
    return probe


def sees(folder: Path, probe: FolderProbe) -> bool:
    """Whether `folder` is here and holds `probe` with the same content."""
    if not PROBE_NAME.fullmatch(probe.name) or not probe.content:
        return False
    try:
        with open_regular(folder / probe.name) as file:
            return file.read(CONTENT_BYTES + 1) == probe.content
    except OSError:
        return False


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; `OSError` for symbolic links, FIFOs and devices."""
    # O_NONBLOCK: opening a FIFO must fail below, not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
