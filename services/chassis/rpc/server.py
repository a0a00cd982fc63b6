"""Run a service: configuration, logs, event loop, gRPC, admin port, background work, drain.

LOADING -> BUILDING -> SERVING -> DRAINING -> exit 0        on SIGTERM or SIGINT
                                           -> exit 69, 70   lost dependency, bug
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from seamflow import waits
from seamflow.channel import MAX_MESSAGE_BYTES
from seamflow.common.v1 import process_service_pb2 as process_pb
from seamflow.common.v1.process_service_pb2_grpc import (
    ProcessServiceServicer,
    add_ProcessServiceServicer_to_server,
)
from seamflow.durations import to_duration
from seamflow.network.keepalive import KEEPALIVE, Keepalive

from services.chassis import log
from services.chassis.config.load import load_or_exit
from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ExitCode, StartupError
from services.chassis.log import get_logger
from services.chassis.rpc import admin, listen, tracing
from services.chassis.rpc.interceptors import CallInterceptor
from services.chassis.rpc.permissions import Permissions, check_entries

_CHECK_SECONDS = 2.0
_INTERVAL_SECONDS = 1.0

_CANCEL_AGAIN_SECONDS = 0.5

ConfigType = TypeVar("ConfigType", bound=ServerConfig)
Build = Callable[[ConfigType], AbstractAsyncContextManager["Service"]]


class Health:
    """NOT_SERVING -> SERVING -> NOT_SERVING ..., moved by `check`; `drain` ends it in NOT_SERVING.

    Args:
        names: full names of the gRPC services, in addition to "" for the whole process.
        ready: whether the dependencies are available; None means always.
    """

    def __init__(self, names: Sequence[str], ready: Callable[[], Awaitable[bool]] | None) -> None:
        self.servicer = _Servicer()
        self._names = ("", *names)
        self._ready = ready
        self._last: bool | None = None
        self._draining = False

    async def check(self) -> bool:
        """Check the dependencies now; publish and return the result."""
        answer = not self._draining and await self._ask()
        if answer is not self._last:
            self._last = answer
            get_logger().info("ready" if answer else "not_ready")
            await self._publish(answer)
        return answer

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            await self.check()

    async def drain(self) -> None:
        """Report NOT_SERVING permanently."""
        self._draining = True
        await self.servicer.enter_graceful_shutdown()
        self.servicer.drained.set()

    async def _ask(self) -> bool:
        if self._ready is None:
            return True
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                return await self._ready()
        except Exception as error:
            # A check that fails counts as not ready; liveness is not affected.
            get_logger().warning("readiness_check_failed", error=repr(error))
            return False

    async def _publish(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            await self.servicer.set(name, states.SERVING if serving else states.NOT_SERVING)


class _Servicer(HealthServicer):  # type: ignore[misc]
    """Ends its watches when the process drains; they would otherwise block it until the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.drained = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 -- the contract's name
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(super().Watch(request, context))
            await self.drained.wait()
            watch.cancel()


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of a process that `run` serves."""

    servicers: Sequence[tuple[Callable[[Any, Any], None], Any]] = ()
    """Pairs of a generated `add_XServicer_to_server` and its servicer."""
    background: Sequence[Callable[[], Awaitable[None]]] = ()
    """Loops that run until the process ends; one that raises ends it with exit code 70."""
    ready: Callable[[], Awaitable[bool]] | None = None
    """Whether the dependencies are available, checked every second. None means always."""
    drain: Callable[[], Awaitable[None]] | None = None
    """Called at the start of a drain, when new calls are rejected: ends long polls."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Further ports that the parts listen on, by name, to be announced."""
    max_request_bytes: int = MAX_MESSAGE_BYTES
    """Largest request; gRPC refuses larger ones with RESOURCE_EXHAUSTED."""
    keepalive: Keepalive = KEEPALIVE
    """When a silent client counts as lost."""


@dataclass(frozen=True, slots=True)
class _Listening:
    server: grpc.aio.Server
    health: Health
    port: int


def run(table: str, config_class: type[ConfigType], build: Build[ConfigType]) -> NoReturn:
    """Load the configuration of `table`, build the service and serve it until a signal; then exit.

    `build` is an async context manager: the resources it opens are closed after the drain.
    """
    config = load_or_exit(config_class, table)
    log.configure(config, table)
    _allow_open_files()
    sys.exit(_outcome(table, config, build))


@asynccontextmanager
async def started(
    service: Service, config: ServerConfig, table: str = "test"
) -> AsyncIterator[int]:
    """Serve in this process, for tests, with the production interceptors; yields the port."""
    async with _listening(service, config, table) as listening:
        work = asyncio.create_task(_work(service, listening.health))
        try:
            yield listening.port
        finally:
            await _drain(listening, service, config.drain_seconds)
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


def _allow_open_files() -> None:
    """As many as the system lets us: each connection is one, and shells start us with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _outcome(table: str, config: ConfigType, build: Build[ConfigType]) -> ExitCode:
    try:
        with (
            tracing.exporting(config, table),
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            runner.run(_main(table, config, build))
    except asyncio.CancelledError:
        return ExitCode.CLEAN  # stopped while it was still being built
    except Exception as error:
        return _failed(table, error)
    return ExitCode.CLEAN


def _failed(table: str, error: Exception) -> ExitCode:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, StartupError):
        print(f"{table}: {error}", file=sys.stderr)
        return error.exit_code
    log.get_logger().critical("crashed", exc_info=error)
    return ExitCode.BUG


async def _main(table: str, config: ConfigType, build: Build[ConfigType]) -> None:
    stop = _Stop()
    async with (
        build(config) as service,
        _listening(service, config, table) as listening,
        admin.serving(config, table, listening.health.check) as admin_port,
        asyncio.TaskGroup() as tasks,
    ):
        work = tasks.create_task(_work(service, listening.health))
        stop.serving()
        _announce({"port": listening.port, "admin_port": admin_port, **service.ports})
        await stop.wait()
        await _drain(listening, service, config.drain_seconds)
        work.cancel()


class _ProcessServicer(ProcessServiceServicer):
    """What this process waits for, for `seamflow why-stuck` and the launcher."""

    def __init__(self, process: str, instance: str) -> None:
        self._process, self._instance = process, instance

    async def GetWaits(  # noqa: N802
        self, request: process_pb.GetWaitsRequest, context: Any
    ) -> process_pb.GetWaitsResponse:
        now = time.monotonic()
        return process_pb.GetWaitsResponse(
            process=self._process,
            instance=self._instance,
            waits=[
                process_pb.Wait(
                    reason=each.reason, cure=each.cure, duration=to_duration(now - each.since)
                )
                for each in waits.current()
            ],
        )


@asynccontextmanager
async def _listening(
    service: Service, config: ServerConfig, table: str
) -> AsyncIterator[_Listening]:
    server = grpc.aio.server(
        interceptors=[CallInterceptor(table, Permissions(config))],
        options=listen.server_options(service.max_request_bytes, service.keepalive),
    )
    registrar: Any = _Registrar(server)
    add_ProcessServiceServicer_to_server(_ProcessServicer(table, config.instance), registrar)
    for add, servicer in service.servicers:
        add(servicer, registrar)
    check_entries(registrar.names)
    state = Health(tuple(registrar.names), service.ready)
    health_pb2_grpc.add_HealthServicer_to_server(state.servicer, server)
    if config.development:
        names = (*registrar.names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    port = listen.bind(server, config)
    await state.check()
    await server.start()
    try:
        yield _Listening(server, state, port)
    finally:
        await server.stop(None)


async def _work(service: Service, state: Health) -> None:
    """Run the background loops; one that raises ends the others."""
    loops = (*service.background, state.watch)
    tasks = [asyncio.create_task(_awaited(loop)) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    # Repeatedly: redis-py swallows a cancellation that coincides with a reply.
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def _drain(listening: _Listening, service: Service, seconds: float) -> None:
    """Reject new calls and wait for those in flight, for `seconds` at most."""
    log.get_logger().info("draining", seconds=seconds)
    await listening.health.drain()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listening.server.stop(seconds))
        if service.drain is not None:
            tasks.create_task(_bounded(service.drain, seconds))


async def _bounded(work: Callable[[], Awaitable[None]], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work()
    except TimeoutError:
        log.get_logger().warning("drain_incomplete", seconds=seconds)


class _Registrar:
    """Forwards handlers to a server and records their services, for health and reflection."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.names: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self.names.extend(handler.service_name() for handler in handlers)
        self._server.add_generic_rpc_handlers(tuple(handlers))

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        self._server.add_registered_method_handlers(service_name, handlers)


class _Stop:
    """Signal handling: the first SIGTERM or SIGINT drains the process, the second ends it."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._building = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def serving(self) -> None:
        """Signals now drain the process; before, they abort its start."""
        self._building = None

    async def wait(self) -> None:
        """Return at the first signal."""
        await self._asked.wait()

    def _on_signal(self, number: int) -> None:
        if self._asked.is_set():
            os._exit(128 + number)
        self._asked.set()
        if self._building is not None:
            self._building.cancel()


def _announce(ports: Mapping[str, int]) -> None:
    log.get_logger().info("serving", **ports)
    if path := os.environ.get("SEAMFLOW_PORT_FILE"):
        # Renamed into place, so that readers never see a partial file.
        partial = Path(f"{path}.{os.getpid()}")
        partial.write_text(json.dumps(dict(ports)))
        partial.replace(path)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if os.environ.get("SEAMFLOW_UVLOOP", "1") == "0":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop
