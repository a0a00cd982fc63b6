"""What a finished run has stored, served again: a private Redis on a copy of its data, with a
trajectory manager and a scheduler, on loopback and for this console alone.

The copy is deleted at the end; the run's folder is never written to.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from seamflow.credentials import Credentials
from seamflow.errors import NotFoundError, UnavailableError
from seamflow.inspect.endpoints import Endpoints

from services.lib.child_process import Child
from services.lib.redis_binary import find_redis_server, socket_folder

_ROOT = Path(__file__).parents[3]
_START_SECONDS = 120.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.05
_MODULES = ("trajectory_manager", "scheduler")


@asynccontextmanager
async def private_store(folder: Path, run_id: str) -> AsyncIterator[Endpoints]:
    """Addresses of services that serve what the run in `folder` has stored, within the block.

    Raises:
        NotFoundError: the folder holds no data of a private Redis.
        UnavailableError: a process does not start; names the log's last line.
    """
    data = folder / "redis" / "appendonlydir"
    if not data.is_dir():
        raise NotFoundError(
            f"{folder / 'redis'} holds no data: the run used another Redis; its curves and logs "
            "are shown, its rollouts need that Redis (`seamflow console` with trajectory_manager)"
        )
    async with AsyncExitStack() as stack:
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seamflow-console-")))
        await asyncio.to_thread(_copy, data, copy / data.name)
        socket = Path(stack.enter_context(socket_folder()), "redis.sock")
        token = secrets.token_hex(32)
        await _started(stack, _redis(copy, socket), copy, "redis", socket)
        files = {module: copy / f"{module}.port" for module in _MODULES}
        services = {m: _service(m, copy, socket, token) for m in _MODULES}
        await asyncio.gather(
            *(_started(stack, services[m], copy, m, file) for m, file in files.items())
        )
        ports = {module: json.loads(file.read_text())["port"] for module, file in files.items()}
        addresses = {module: f"127.0.0.1:{port}" for module, port in ports.items()}
        credentials = Credentials(token=token)
        endpoints = Endpoints(run_id=run_id, services=addresses, credentials=credentials)
        stack.push_async_callback(endpoints.close)
        yield endpoints


def _copy(data: Path, copy: Path) -> None:
    """The base never changes and is linked; Redis appends to the rest, or cuts its end off."""
    copy.mkdir(mode=0o700)
    for file in data.iterdir():
        if ".base." in file.name:
            try:
                os.link(file, copy / file.name)
                continue
            except OSError:  # another file system
                pass
        shutil.copyfile(file, copy / file.name)


_Command = tuple[tuple[str, ...], dict[str, str]]
"""Arguments, and variables beside this process's own."""


def _redis(folder: Path, socket: Path) -> _Command:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "no",
        "save": "",
    }
    arguments = (part for name, value in options.items() for part in (f"--{name}", value))
    return (find_redis_server(), *arguments), {}


def _service(module: str, folder: Path, socket: Path, token: str) -> _Command:
    prefix = f"SEAMFLOW_{module.upper()}_"
    given = {
        "PORT": "0",
        "ADMIN_PORT": "-1",
        "REDIS_URL": f"unix://{socket}",
        "TOKEN": token,
        "LOG_LEVEL": "warning",
        **(
            {"SWEEP_SECONDS": "1e9", "UNLEASED_ROLLOUT_SECONDS": "0"} if "manager" in module else {}
        ),
    }
    environment = {f"{prefix}{name}": value for name, value in given.items()}
    return (sys.executable, "-m", module), {
        **environment,
        "SEAMFLOW_PORT_FILE": str(folder / f"{module}.port"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",
    }


async def _started(
    stack: AsyncExitStack, command: _Command, folder: Path, name: str, sign: Path
) -> None:
    """Start a process, ended with the stack, and wait until it has made the file `sign`."""
    log = folder / f"{name}.log"
    arguments, variables = command
    kept_variables = {k: v for k, v in os.environ.items() if not k.startswith("SEAMFLOW_")}
    child = await Child.start(arguments, {**kept_variables, **variables}, log)
    stack.push_async_callback(child.end, _END_SECONDS)
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not await asyncio.to_thread(sign.exists):
                if not child.is_running:
                    raise UnavailableError(f"{name} does not start: {_last_line(log)}")
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        raise UnavailableError(f"{name} does not start within {_START_SECONDS:g} s") from error


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"
