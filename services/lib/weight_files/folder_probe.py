"""Probes: small files with a random content, by which two processes find a folder both see."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from seamflow.weights.v1.weight_service_pb2 import FolderProbe

from services.lib.weight_files.shard_sender import open_regular

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
