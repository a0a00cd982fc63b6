"""What a backup holds: a snapshot of Redis at one moment, which a private server reads, and files.

The server sends it by SYNC, as to a new replica: no access to its disk is needed, and everything
that it has acknowledged is in it. The user of the URL needs the right to run `sync`.

backup.json                              written last: without it a folder is no backup
redis.rdb                                the snapshot
checkpoints/<run>/step_000000012/...     as the trainer wrote it
weights/<run>/policy/weight_v000012/...  newest committed version
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from services.chassis.errors import ConfigError
from services.chassis.redis.connect import connect
from services.chassis.redis.url import parse_redis_url
from services.lib.redis_binary import find_redis_server, socket_folder

MANIFEST = "backup.json"
RDB = "redis.rdb"
FORMAT = 2

_CHUNK = 1 << 20
_MARK = b"$EOF:"
_MARK_BYTES = 40
_SILENCE_SECONDS = 60.0
_START_SECONDS = 120.0


class BackupError(ConfigError):
    """A backup that cannot be made or used; the message names the file or setting, and the cure."""


@dataclass(slots=True, kw_only=True)
class Contents:
    """`backup.json`."""

    release: str
    """Of seamflow, which made the backup."""
    time: float
    """Unix seconds of the snapshot."""
    database: int
    num_keys: int
    runs: dict[str, dict[str, int]] = field(default_factory=dict)
    """By run: committed_step, leased_step, checkpoint_step and weight_version; 0 for none."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by path in the backup."""

    def write(self, folder: Path) -> None:
        """Write it durably, as the last file."""
        file = folder / MANIFEST
        file.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1))
        _sync(file)
        _sync(folder)


def read_contents(folder: Path) -> Contents:
    """What is in the backup, after each file was checked.

    Raises:
        BackupError: it is not a backup, or names the file that is missing or changed.
    """
    try:
        record = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        message = f"{folder} is not a whole backup: {MANIFEST} cannot be read: {error}"
        raise BackupError(message) from error
    if record.pop("format") != FORMAT:
        raise BackupError(f"{folder} was written by another release: restore it with that release")
    contents = Contents(**record)
    for path, digest in contents.files.items():
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise BackupError(f"{folder / MANIFEST} names {path!r}, outside the backup")
        if not (folder / path).is_file():
            raise BackupError(f"{folder / path} is missing: use another backup")
        if sha256_of(folder / path) != digest:
            raise BackupError(
                f"{folder / path} differs from its checksum, so it is damaged: use another backup"
            )
    return contents


def copied(source: Path, target: Path) -> None:
    """Copy a file durably; `target` exists only when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.copying")
    shutil.copyfile(source, partial)
    _sync(partial)
    partial.replace(target)
    _sync(target.parent)


def sha256_of(path: Path) -> str:
    """In hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_one_server(url: str) -> None:
    """Refuse a cluster, whose nodes have no moment in common.

    Raises:
        BackupError: it says what to do.
    """
    if parse_redis_url(url).topology == "cluster":
        raise BackupError(
            "redis_url is of a cluster, whose nodes cannot be copied at one moment: stop the "
            "trainers and trajectory managers, then copy every node with your operator's tools"
        )


def database_of(url: str) -> int:
    """Number of the database in the URL."""
    return int(parse_redis_url(url).options.get("db") or 0)


async def fetch_snapshot(url: str, file: Path) -> None:
    """Write the snapshot of the server, or of the Sentinels' current master, to `file`.

    Raises:
        BackupError: the server refuses, is silent, or the connection breaks.
    """
    client = connect(url)
    try:
        pool: Any = client.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_command("SYNC")
            # What follows is no reply of the protocol that redis-py parses.
            await _received(connection._reader, file)
        finally:
            await connection.disconnect(nowait=True)
    except (exceptions.ResponseError, exceptions.AuthenticationError) as error:
        raise BackupError(f"redis_url: the server refuses: {error}") from error
    except (OSError, TimeoutError, asyncio.IncompleteReadError, exceptions.RedisError) as error:
        raise BackupError(f"redis_url: the snapshot broke off: {error!r}: try again") from error
    finally:
        await client.aclose()


async def _received(reader: asyncio.StreamReader, file: Path) -> None:
    head = await _line(reader)
    with file.open("wb") as out:
        if head.startswith(_MARK):
            await _until_mark(reader, head.removeprefix(_MARK), out)
            return
        left = int(head.removeprefix(b"$"))
        while left:
            data = await _chunk(reader, min(left, _CHUNK))
            out.write(data)
            left -= len(data)


async def _until_mark(reader: asyncio.StreamReader, mark: bytes, out: Any) -> None:
    """A snapshot of unknown length, which ends with the mark."""
    held = b""
    while held != mark:
        held += await _chunk(reader, _CHUNK)
        end = held.find(mark)
        if end >= 0:
            out.write(held[:end])
            return
        out.write(held[:-_MARK_BYTES])
        held = held[-_MARK_BYTES:]


async def _chunk(reader: asyncio.StreamReader, size: int) -> bytes:
    async with asyncio.timeout(_SILENCE_SECONDS):
        data = await reader.read(size)
    if not data:
        raise ConnectionError("the server closed the connection")
    return data


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty ones keep the connection alive while the server prepares."""
    while True:
        async with asyncio.timeout(_SILENCE_SECONDS):
            line = (await reader.readuntil(b"\n")).strip()
        if line.startswith(b"-"):
            message = line[1:].decode(errors="replace")
            raise BackupError(f"redis_url: the server refuses: {message}; a user may need +sync")
        if line:
            return line


@asynccontextmanager
async def serving(rdb: Path, database: int) -> AsyncIterator[Any]:
    """A `Redis` client of a private server that has loaded a copy of the snapshot.

    Raises:
        BackupError: the server cannot load it.
    """
    with tempfile.TemporaryDirectory(prefix="seamflow-backup-") as name, socket_folder() as short:
        folder = Path(name)
        await asyncio.to_thread(shutil.copyfile, rdb, folder / RDB)
        socket = Path(short, "socket")
        settings = {"port": 0, "unixsocket": socket, "dir": folder, "dbfilename": RDB, "save": ""}
        flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        process = await asyncio.create_subprocess_exec(
            find_redis_server(), *flags, stdout=asyncio.subprocess.DEVNULL
        )
        client = Redis(unix_socket_path=str(socket), db=database)
        try:
            await _until_loaded(client, process, rdb)
            yield client
        finally:
            await client.aclose()
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _until_loaded(client: Redis, process: asyncio.subprocess.Process, rdb: Path) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while process.returncode is None:
            try:
                await client.ping()
            except (exceptions.ConnectionError, exceptions.BusyLoadingError):
                await asyncio.sleep(0.02)
            else:
                return
    raise BackupError(f"{rdb} cannot be loaded by {find_redis_server()}: it is damaged, or newer")
