"""A snapshot of Redis at one moment, and a private server to read it.

The server sends it by SYNC, as to a new replica: no access to its disk is needed, and everything
that it has acknowledged is in it. The user of the URL needs the right to run `sync`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from services.chassis.redis.connect import connect
from services.chassis.redis.url import parse_redis_url
from services.lib.redis_binary import find_redis_server, socket_folder
from tools.backup.contents import RDB, BackupError

_CHUNK = 1 << 20
_MARK = b"$EOF:"
_MARK_BYTES = 40
_SILENCE_SECONDS = 60.0
_START_SECONDS = 120.0


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
