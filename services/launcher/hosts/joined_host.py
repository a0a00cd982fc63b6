"""One joining of a host: its processes, from their start to the order that ends them."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.launcher.v1 import launcher_service_pb2 as pb

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.launcher.checks.run_settings import divided_threads, num_cores
from services.launcher.child_process import ProcessPlan
from services.launcher.hosts.other_hosts import FOLDER_MARK, host_variables
from services.launcher.same_run import fingerprint
from services.launcher.supervisor import ChildFailed, Supervisor, run_until_failure

if TYPE_CHECKING:
    from seamflow.launcher.v1.launcher_service_pb2_grpc import LauncherServiceAsyncStub

_REPORT_SECONDS = 1.0
_CALL_SECONDS = 5.0
_PORT_SECONDS = 30.0
"""Processes of an earlier joining may take this long to end."""


class JoinedHost:
    """The processes of this host, for one joining.

    Args:
        stub: of the launcher on host 0.
        answer: the processes to start.
        given: the command line: address, host, runs_folder, patience.
    """

    def __init__(
        self, stub: LauncherServiceAsyncStub, answer: pb.JoinRunResponse, given: argparse.Namespace
    ) -> None:
        self._stub, self._answer, self._given = stub, answer, given
        self._folder = self._run_folder()

    async def until_order(self) -> pb.HostOrder.ValueType:
        """Start the processes and keep them until the launcher orders otherwise; END or JOIN.

        Raises:
            ConfigError: the model is missing or another one, the folder must be shared and is not.
            DependencyUnavailable: a process cannot run, host 0 is silent, or another caller has
                joined as this host.
        """
        self._check_model()
        self._write_files()
        os.environ.update(host_variables(self._answer.address, self._answer.hosts))
        plans = {plan.name: plan for plan in map(self._plan, self._answer.processes)}
        changes, lines = divided_threads(os.environ, plans, num_cores())
        os.environ.update(changes)
        for line in lines:
            print(f"join: warning: {line}", file=sys.stderr)
        logs = self._folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        async with Supervisor(logs) as processes:
            try:
                return await run_until_failure(processes, self._work(processes, plans))
            except ChildFailed as error:
                await self._report(str(error), error.exit_code)
                raise

    async def _work(
        self, processes: Supervisor, plans: dict[str, ProcessPlan]
    ) -> pb.HostOrder.ValueType:
        starting = asyncio.create_task(self._start(processes, plans))
        try:
            return await self._follow(starting)
        finally:
            starting.cancel()

    async def _start(self, processes: Supervisor, plans: dict[str, ProcessPlan]) -> None:
        for process in self._answer.processes:
            await self._wait_for_port(process)
        for plan in plans.values():
            await processes.start(plan)

    async def _follow(self, starting: asyncio.Task[None]) -> pb.HostOrder.ValueType:
        """Report until the answer is to end."""
        answered = time.monotonic()
        while True:
            if starting.done():
                starting.result()
            order = await self._report()
            if order in (pb.HOST_ORDER_END, pb.HOST_ORDER_JOIN):
                return order
            if order == pb.HOST_ORDER_SUPERSEDED:
                raise DependencyUnavailable(
                    f"host {self._given.host}",
                    "another `seamflow join` has joined as this host: give each its own --host",
                )
            if order == pb.HOST_ORDER_CONTINUE:
                answered = time.monotonic()
            elif time.monotonic() - answered > self._given.patience:
                raise DependencyUnavailable(
                    "host 0",
                    f"the launcher at {self._given.address} has not answered for "
                    f"{self._given.patience:.0f} s: --resume the run there, then join again",
                )
            await asyncio.sleep(_REPORT_SECONDS)

    async def _report(self, failure: str = "", exit_code: int = 0) -> pb.HostOrder.ValueType:
        """What to do; UNSPECIFIED: the launcher has not answered."""
        request = pb.ReportHostRequest(
            host=self._given.host,
            join_id=self._answer.join_id,
            failure=failure,
            exit_code=exit_code,
        )
        try:
            answer = await self._stub.ReportHost(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError:
            return pb.HOST_ORDER_UNSPECIFIED
        return answer.order

    def _plan(self, process: pb.HostProcess) -> ProcessPlan:
        return ProcessPlan(
            name=process.name,
            command=tuple(self._here(part) for part in process.command),
            environment={name: self._here(text) for name, text in process.environment.items()},
        )

    def _here(self, text: str) -> str:
        return text.replace("{run}", str(self._folder)).replace("{python}", sys.executable)

    def _run_folder(self) -> Path:
        """The folder of the run: that of host 0, if this host shares it, else one of its own."""
        shared = Path(self._answer.folder)
        mark = shared / FOLDER_MARK
        if mark.is_file() and mark.read_text(encoding="utf-8") == self._answer.folder_mark:
            return shared
        if self._answer.needs_shared_folder:
            raise ConfigError(
                f"a node of host {self._given.host} trains, and the run's folder {str(shared)!r} "
                "of host 0 is not here: give --runs-folder of `seamflow train` on a file system "
                "that both mount at the same path"
            )
        folder: Path = (self._given.runs_folder / self._answer.run_id).resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def _check_model(self) -> None:
        folder = Path(self._here(self._answer.model))
        try:
            found = dict(fingerprint(folder))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model {str(folder)!r} is not on this host: {error}; copy it here, to the same "
                "path as on host 0"
            ) from error
        if found != dict(self._answer.model_fingerprint):
            raise ConfigError(
                f"model {str(folder)!r} is another one than on host 0: copy that one here, to the "
                "same path"
            )

    def _write_files(self) -> None:
        for name, content in self._answer.files.items():
            file = (self._folder / name).resolve()
            if not file.is_relative_to(self._folder):
                raise ConfigError(f"host 0 sent the file {name!r}, which is outside the run")
            if file.is_file() and file.read_bytes() == content:
                continue
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)

    async def _wait_for_port(self, process: pb.HostProcess) -> None:
        """An earlier joining may still be ending.

        Raises:
            DependencyUnavailable: somebody else has the port.
        """
        limit = time.monotonic() + _PORT_SECONDS
        while process.port and not self._is_free(process.port):
            if time.monotonic() > limit:
                raise DependencyUnavailable(
                    process.name,
                    f"port {process.port} is taken on this host: end what has it, or start the "
                    "run again with --resume, which takes other ports",
                )
            await asyncio.sleep(_REPORT_SECONDS / 5)

    def _is_free(self, port: int) -> bool:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self._answer.address, port))
                listener.listen()
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise ConfigError(
                        f"hosts of the run lists {self._answer.address!r} for host "
                        f"{self._given.host}, which is no address of this machine: give the --host "
                        "of this one"
                    ) from error
                return False
        return True
