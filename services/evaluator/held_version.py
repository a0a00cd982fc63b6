"""A rollout server that keeps one weight version for the time of an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.durations import to_duration
from seamflow.errors import NotFoundError, SeamflowError, decode
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as weight_pb

from services.evaluator.clients import Clients, Worker

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub

_HOLD_SECONDS = 60.0
_RENEW_SECONDS = 5.0
_CALL_SECONDS = 120.0
_RETRY_SECONDS = 0.5
_INFO_SECONDS = 5.0


class VersionLost(Exception):  # noqa: N818 -- names the event
    """No rollout server can load the version any more."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version that a rollout server keeps."""

    weight_version: int
    step: int
    server: str
    lost: asyncio.Future[None]
    """Fails with `VersionLost` once the version cannot be loaded again."""


async def manifest_of(clients: Clients, version: int | None = None) -> weight_pb.Manifest | None:
    """What is known of a version, by default the newest; None: there is none. Waits for an answer.

    Raises:
        SeamflowError: the weights service refuses the call.
    """
    request = weight_pb.GetManifestRequest(run_id=clients.run_id, weight_version=version)
    try:
        response = await retrying(lambda: clients.weights.GetManifest(request))
    except NotFoundError:
        return None
    return response.manifest if response.HasField("manifest") else None


async def await_loaded(clients: Clients, version: int) -> None:
    """Wait until a rollout server has the weights of `version`."""
    request = server_pb.GetServerInfoRequest()
    while True:
        with suppress(SeamflowError):
            for worker in await clients.workers("rollout"):
                server = _server(clients, worker)
                with suppress(grpc.aio.AioRpcError):
                    info = await server.GetServerInfo(request, timeout=_INFO_SECONDS)
                    if info.weight_version == version:
                        return
        await asyncio.sleep(_RETRY_SECONDS)


@asynccontextmanager
async def held(
    clients: Clients, version: int, tell: Callable[[str], None]
) -> AsyncIterator[HeldVersion]:
    """Let one rollout server keep `version`, or the newest if that one is gone.

    It goes on with training turns; one on a node that never trains is never taken away. A server
    that was restarted meanwhile loads the version again, which `tell` reports. Leaving the context
    lets it follow the newest version again.
    """
    server, kept = await _hold_any(clients, version)
    manifest = await manifest_of(clients, kept)
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    renewing = asyncio.create_task(_renew(clients, server, kept, lost, tell))
    try:
        yield HeldVersion(kept, manifest.step if manifest else 0, server.node_id, lost)
    finally:
        renewing.cancel()
        lost.cancel()
        with suppress(SeamflowError):  # the hold ends by itself
            await _update(clients, server, None, 0.0)


async def _hold_any(clients: Clients, version: int) -> tuple[Worker, int]:
    """The first server that takes the hold, and the version that it has then."""
    while True:
        with suppress(SeamflowError):  # the scheduler is restarting
            for server in await clients.workers("rollout"):
                kept = await _hold(clients, server, version)
                if kept is not None:
                    return server, kept
        await asyncio.sleep(_RETRY_SECONDS)


async def _hold(clients: Clients, server: Worker, version: int) -> int | None:
    """The version that the server holds now; None: it takes none."""
    for wanted in (version, None):
        try:
            return await _update(clients, server, wanted, _HOLD_SECONDS)
        except NotFoundError:
            continue  # deleted meanwhile: the newest
        except SeamflowError:
            return None  # restarting, or its node trains
    return None


async def _renew(
    clients: Clients,
    server: Worker,
    version: int,
    lost: asyncio.Future[None],
    tell: Callable[[str], None],
) -> None:
    is_away = False
    while True:
        await asyncio.sleep(_RETRY_SECONDS if is_away else _RENEW_SECONDS)
        try:
            await _update(clients, server, version, _HOLD_SECONDS)
        except NotFoundError as error:
            if not lost.done():
                lost.set_exception(VersionLost(str(error)))
            return
        except SeamflowError:
            is_away = True
        else:
            if is_away:
                tell(f"evaluation: {server.node_id} has weight version {version} again")
            is_away = False


async def _update(clients: Clients, server: Worker, version: int | None, seconds: float) -> int:
    hold = to_duration(seconds) if seconds else Duration()
    request = server_pb.UpdateWeightsRequest(weight_version=version, hold=hold)
    stub = _server(clients, server)
    try:
        answer = await stub.UpdateWeights(request, timeout=_CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise decode(error) from error
    return answer.weight_version


def _server(clients: Clients, worker: Worker) -> RolloutServerServiceAsyncStub:
    return async_stub(RolloutServerServiceStub, clients.endpoints.channel(worker.address))
