"""The launcher's side of the other hosts: gives them their processes, and follows them."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
import psutil
import structlog
from pydantic import SecretStr
from seamflow.launcher.v1 import launcher_service_pb2 as pb
from seamflow.launcher.v1.launcher_service_pb2_grpc import (
    LauncherServiceServicer,
    add_LauncherServiceServicer_to_server,
)

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import invalid_argument
from services.chassis.rpc import listen
from services.chassis.rpc.interceptors import CallInterceptor
from services.chassis.rpc.permissions import Permissions
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.hosts.run_certificates import (
    hosts_folder,
    kept_secret,
    made_secret,
    secret_file,
)
from services.launcher.layout import Layout
from services.launcher.report.view import View
from services.launcher.same_run import fingerprint
from services.launcher.supervisor import ChildFailed

FOLDER_MARK = "hosts/folder_mark"
_LOOK_SECONDS = 0.5
_SILENCE_SECONDS = 15.0
_END_SECONDS = 10.0
_WRITE_IN_FOLDER = ("trainer",)
"""Tables of processes that write what host 0 reads: metrics, checkpoints."""

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without it each rank announces the address of its host's name, which is often loopback."""


@dataclass(slots=True)
class _Host:
    """What is known of one host."""

    join_id: str = ""
    """Of the newest caller; empty: it has not joined."""
    replaced: set[str] = field(default_factory=set)
    """Of earlier callers."""
    seen: float = 0.0
    """When it last reported, by the monotonic clock."""
    knows_end: bool = False
    is_told: bool = False
    """Whether its silence was reported."""


class OtherHosts(LauncherServiceServicer):
    """The hosts of a run but host 0.

    Args:
        config: with the certificates of this run.
        plans: of all hosts.
    """

    def __init__(
        self,
        config: LauncherConfig,
        layout: Layout,
        plans: Mapping[str, ProcessPlan],
        view: View,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        self._config, self._layout, self._view = config, layout, view
        self._plans = [plan for plan in plans.values() if plan.host]
        self._hosts = {number: _Host() for number in range(1, len(layout.hosts))}
        self._silence_seconds = silence_seconds
        self._ended = False
        self._failed: asyncio.Future[NoReturn] | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Let hosts join; at the end send them the end of the run."""
        secret = made_secret(self._layout)
        server = self._server(SecretStr(secret.token))
        await server.start()
        self._ask_to_join()
        try:
            yield
        finally:
            await self._end()
            await server.stop(1)

    async def watch(self) -> NoReturn:
        """Tell people of hosts that are silent; raises what a host reports that cannot go on."""
        self._failed = asyncio.get_running_loop().create_future()
        while True:
            await asyncio.wait([self._failed], timeout=_LOOK_SECONDS)
            if self._failed.done():
                self._failed.result()
            for number, host in self._hosts.items():
                self._look(number, host)

    async def JoinRun(self, request: pb.JoinRunRequest, context: Any) -> pb.JoinRunResponse:  # noqa: N802
        """Give a host its processes; an earlier caller for it has lost them."""
        host = self._known(request.host)
        host.replaced.add(host.join_id)
        host.join_id, host.seen, host.is_told = secrets.token_hex(16), time.monotonic(), False
        self._view.note(f"host {request.host} ({self._layout.hosts[request.host]}) has joined")
        folder = str(self._layout.folder)
        model = self._layout.path(self._config.model)
        own = [plan for plan in self._plans if plan.host == request.host]
        return pb.JoinRunResponse(
            run_id=self._layout.run_id,
            join_id=host.join_id,
            processes=[self._process(plan) for plan in own],
            files=dict(self._files(request.host)),
            folder=folder,
            folder_mark=kept_secret(self._layout.folder / FOLDER_MARK),
            needs_shared_folder=any(plan.table in _WRITE_IN_FOLDER for plan in own),
            model=self._portable(model, request.host),
            model_fingerprint=await asyncio.to_thread(fingerprint, Path(model)),
            address=self._layout.hosts[request.host],
            hosts=self._layout.hosts,
        )

    async def ReportHost(  # noqa: N802
        self, request: pb.ReportHostRequest, context: Any
    ) -> pb.ReportHostResponse:
        host = self._known(request.host)
        if request.join_id != host.join_id:
            known = request.join_id in host.replaced
            order = pb.HOST_ORDER_SUPERSEDED if known else pb.HOST_ORDER_JOIN
            return pb.ReportHostResponse(order=pb.HOST_ORDER_END if self._ended else order)
        host.seen, host.is_told = time.monotonic(), False
        if request.failure and self._failed is not None and not self._failed.done():
            name = f"host {request.host}"
            self._failed.set_exception(ChildFailed(name, request.exit_code, request.failure))
        host.knows_end = self._ended
        order = pb.HOST_ORDER_END if self._ended else pb.HOST_ORDER_CONTINUE
        return pb.ReportHostResponse(order=order)

    def _server(self, token: SecretStr) -> grpc.aio.Server:
        """With TLS and the token of the secret: a host that joins has no certificate yet."""
        config = ServerConfig(
            host=self._layout.hosts[0],
            port=self._layout.ports["join"],
            tls_cert_file=self._config.tls_cert_file,
            tls_key_file=self._config.tls_key_file,
            token=token,
        )
        # Its calls are not shown in the run's log.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
        server = grpc.aio.server(
            interceptors=[CallInterceptor("launcher", Permissions(config))],
            options=listen.server_options(),
        )
        add_LauncherServiceServicer_to_server(self, server)
        listen.bind(server, config)
        return server

    def _known(self, number: int) -> _Host:
        if number not in self._hosts:
            cure = f"the run has hosts 1 to {len(self._hosts)} beside the one of `seamflow train`"
            raise invalid_argument("host", number, cure)
        return self._hosts[number]

    def _process(self, plan: ProcessPlan) -> pb.HostProcess:
        """A process as sent to a host; settings in this shell's variables are valid there too."""
        prefix = f"SEAMFLOW_{plan.table}_".upper()
        ours = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
        variables = {**ours, **plan.environment}
        return pb.HostProcess(
            name=plan.name,
            command=[self._portable(part, plan.host) for part in plan.command],
            environment={n: self._portable(text, plan.host) for n, text in variables.items()},
            port=int(plan.environment.get(f"{prefix}PORT", 0)),
        )

    def _portable(self, text: str, host: int) -> str:
        """A text with placeholders for what lies elsewhere on another host."""
        text = text.replace(str(self._layout.config_file), f"{{run}}/{_file_of(host)}")
        text = text.replace(str(self._layout.folder), "{run}")
        return text.replace(sys.executable, "{python}")

    def _files(self, number: int) -> Iterator[tuple[str, bytes]]:
        yield _file_of(number), self._layout.config_file.read_bytes()
        for file in sorted((hosts_folder(self._layout) / str(number)).glob("*/*.pem")):
            yield str(file.relative_to(self._layout.folder)), file.read_bytes()

    def _ask_to_join(self) -> None:
        address = f"{self._layout.hosts[0]}:{self._layout.ports['join']}"
        for number in self._hosts:
            self._view.note(
                f"on host {number} ({self._layout.hosts[number]}), in a copy of this folder:\n"
                f"  seamflow join {address} --host {number} --secret-file FILE\n"
                f"  FILE is a copy of {secret_file(self._layout)}"
            )

    def _look(self, number: int, host: _Host) -> None:
        silent = time.monotonic() - host.seen > self._silence_seconds
        if host.join_id and silent and not host.is_told and not self._ended:
            host.is_told = True
            self._view.note(
                f"host {number} ({self._layout.hosts[number]}) has been silent for "
                f"{self._silence_seconds:.0f} s: the run goes on without it, or waits if it "
                f"cannot; start `seamflow join` there again"
            )

    async def _end(self) -> None:
        """Wait, for a time, until each host that is alive has received the end."""
        self._ended = True
        limit = time.monotonic() + _END_SECONDS
        while time.monotonic() < limit and any(map(self._awaits_end, self._hosts.values())):
            await asyncio.sleep(_LOOK_SECONDS / 5)

    def _awaits_end(self, host: _Host) -> bool:
        is_alive = time.monotonic() - host.seen < _END_SECONDS
        return bool(host.join_id) and is_alive and not host.knows_end


def _file_of(host: int) -> str:
    """The configuration file of a host, below the run's folder."""
    return f"hosts/{host}/run.toml"


def host_variables(
    address: str, hosts: Sequence[str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables for the processes of the host with `address`: no proxy between `hosts`, and the
    interface for collectives, where the user has not named one."""
    found = {}
    for name in ("no_proxy", "NO_PROXY"):
        given = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        found[name] = ",".join(dict.fromkeys((*given, *hosts)))
    interface = _interface(address)
    return found | {
        name: interface for name in _INTERFACES if interface and name not in environment
    }


def _interface(address: str) -> str:
    """Name of the interface that has the address; empty: none has, or it is loopback."""
    if address.startswith("127."):
        return ""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if any(a.address == address for a in has)), "")
