"""The processes of a run: which of them stand still, and what each says that it waits for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio

from seamflow.common.v1 import process_service_pb2 as pb
from seamflow.common.v1.process_service_pb2_grpc import ProcessServiceStub
from seamflow.errors import UnavailableError
from seamflow.inspect.endpoints import SERVICES, Endpoints
from seamflow.inspect.run_files import json_object
from seamflow.network.host_port import listens
from seamflow.processes import procfs
from seamflow.stubs import async_stub

FILE = "processes.json"
"""In the folder of the logs: the launcher's processes of this machine by name."""
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a run."""

    name: str
    """Of its log, without `.log`."""
    address: str = ""
    """host:port of its gRPC port; empty: it has none."""
    pid: int | None = None
    """On this machine; None: it is elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What is seen of a process from outside, and what it says itself."""

    process: Process
    stopped: tuple[int, ...] = ()
    """Of it and of all that it started, the ids of those that a signal has stopped."""
    age: float | None = None
    """Seconds since its start; None: unknown here."""
    is_running: bool = True
    """False: there is no such process on this machine now."""
    answers: bool = False
    """Whether it has said what it waits for, if anything."""
    is_silent: bool = False
    """Whether it accepts connections and answers none: one that loads a model accepts none."""
    waits: tuple[pb.Wait, ...] = ()


def write_processes(folder: Path, processes: Sequence[Process]) -> None:
    """Write the file, whole or not at all; nothing if the disk refuses it."""
    file = folder / FILE
    rows = {each.name: {"address": each.address, "pid": each.pid} for each in processes}
    with suppress(OSError):
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)


def known_processes(endpoints: Endpoints) -> list[Process]:
    """Those of the run's folder; without one, the services whose addresses are known."""
    found = {} if endpoints.folder is None else json_object(endpoints.folder / "logs" / FILE)
    if found:
        return [Process(name=name, **fields) for name, fields in found.items()]
    return [Process(name=SERVICES[n].key, address=at) for n, at in endpoints.services.items()]


async def look(
    processes: Sequence[Process], endpoints: Endpoints, seconds: float
) -> tuple[ProcessState, ...]:
    """The state of each; a call takes at most `seconds`."""
    here = await asyncio.to_thread(procfs.read_all)
    return tuple(
        await asyncio.gather(*(_look(each, endpoints, seconds, here) for each in processes))
    )


async def _look(
    process: Process,
    endpoints: Endpoints,
    seconds: float,
    here: Mapping[int, procfs.Process],
) -> ProcessState:
    seen = ProcessState(process=process)
    if process.pid is not None and here:
        family = procfs.descendants(process.pid, here)
        seen = replace(
            seen,
            stopped=tuple(each.identity.pid for each in family if each.is_stopped),
            age=family[0].age if family else None,
            is_running=bool(family),
        )
    if not process.address or not seen.is_running or seen.stopped:
        return seen
    stub = async_stub(ProcessServiceStub, endpoints.channel(process.address))
    try:
        answer = await stub.GetWaits(pb.GetWaitsRequest(), timeout=seconds)
    except (grpc.aio.AioRpcError, UnavailableError) as error:
        has_answered = isinstance(error, grpc.aio.AioRpcError) and error.code() not in _SILENT
        is_silent = not has_answered and await asyncio.to_thread(listens, process.address)
        return replace(seen, is_silent=is_silent)
    return replace(seen, answers=True, waits=tuple(answer.waits))
