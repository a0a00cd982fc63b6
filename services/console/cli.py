"""Entry point: `seamflow console [RUN FOLDER]`, or `python -m services.console`."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NoReturn

from seamflow.inspect.endpoints import UsageError

from services.chassis.errors import ConfigError
from services.chassis.rpc.server import Service, run
from services.console.app import STATIC, Login, application
from services.console.bundle import bundle
from services.console.config import ConsoleConfig
from services.console.routes import Routes
from services.console.sources.shown_runs import ShownRun, ShownRuns, demo_run, folder_run, live_run
from services.lib.http.http_server import is_local, serving

_LATEST = Path("runs/latest")
_USAGE = """\
seamflow console [RUN FOLDER]   a run in progress or a finished one (default: runs/latest)
seamflow console --demo         a recorded run
seamflow console bundle --help  chosen rollouts as a folder to share

Of a run that `seamflow train` started, http://ADDRESS/?token=TOKEN is the link: `console` in
addresses.json of its folder is the address, the file console_token there holds the token.
"""


@asynccontextmanager
async def build(config: ConsoleConfig) -> AsyncIterator[Service]:
    login = Login(config)
    async with AsyncExitStack() as stack:
        own = stack.enter_context(demo_run()) if config.demo else _own_run(config)
        runs = ShownRuns(own, None if config.demo or own.folder is None else own.folder.parent)
        stack.push_async_callback(runs.close)
        routes = Routes(config, runs)
        stack.push_async_callback(routes.close)
        app = application(config, login, routes.routes())

        async def drain() -> None:
            await routes.close()
            await http.drain()

        http = await stack.enter_async_context(serving(app, config, plain=_is_plain(config)))
        if config.access_token is None:  # one from the settings is known already
            print(f"console: {_address(config, http.port)}{login.path}", flush=True)
        yield Service(
            background=[http.keep_certificate, routes.warm],
            drain=drain,
            ports={"http_port": http.port},
        )


def _is_plain(config: ConsoleConfig) -> bool:
    """On loopback, where certificates are those that it shows to other services."""
    return config.tls_cert_file is None or is_local(config.host)


def _address(config: ConsoleConfig, port: int) -> str:
    scheme = "http" if _is_plain(config) else "https"
    return config.public_url.rstrip("/") or f"{scheme}://{config.host}:{port}"


def _own_run(config: ConsoleConfig) -> ShownRun:
    if config.trajectory_manager:
        return live_run(config)
    try:
        return folder_run(config.run_folder or _LATEST)
    except UsageError as error:
        cure = "or --demo for a recorded run"
        raise ConfigError(f"{error}, {cure}: seamflow console runs/NAME") from error


def main() -> NoReturn:
    """Serve the console until SIGTERM, or write a bundle."""
    if sys.argv[1:2] == ["bundle"]:
        sys.exit(bundle(sys.argv[2:], STATIC))
    if {"-h", "--help"} & set(sys.argv[1:2]):
        print(_USAGE)
    if sys.stdout.isatty():  # a person reads it: the link, and what goes wrong
        os.environ.setdefault("SEAMFLOW_CONSOLE_LOG_FORMAT", "console")
        os.environ.setdefault("SEAMFLOW_CONSOLE_LOG_LEVEL", "warning")
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        sys.argv[1:2] = ["--run-folder", sys.argv[1]]
    run("console", ConsoleConfig, build)
