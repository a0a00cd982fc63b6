"""A rollout server that keeps one weight version for the time of an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.durations import to_duration
from seamflow.errors import NotFoundError, SeamflowError, decode
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.weights.v1 import weight_service_pb2 as weight_pb

from services.launcher.config import LauncherConfig
from services.launcher.service_clients import Services

__all__ = ["HeldVersion", "VersionLost", "held", "manifest_of"]

_HOLD_SECONDS = 60.0
_RENEW_SECONDS = 5.0
_CALL_SECONDS = 120.0
_RETRY_SECONDS = 0.5


class VersionLost(Exception):  # noqa: N818 -- names the event
    """No rollout server can load the version any more."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version that a rollout server keeps."""

    weight_version: int
    """The version."""
    step: int
    """Optimizer step that made it."""
    server: str
    """Node of the rollout server."""
    lost: asyncio.Future[None]
    """Fails with `VersionLost` once the version cannot be loaded again."""


async def manifest_of(services: Services, version: int | None = None) -> weight_pb.Manifest | None:
    """What is known of a version, by default the newest; None: there is none, or no answer."""
    request = weight_pb.GetManifestRequest(run_id=services.run_id, weight_version=version)
    try:
        response = await services.weights.GetManifest(request, timeout=10.0)
    except grpc.aio.AioRpcError:
        return None
    return response.manifest if response.HasField("manifest") else None


@asynccontextmanager
async def held(
    services: Services,
    config: LauncherConfig,
    version: int,
    tell: Callable[[str], None],
) -> AsyncIterator[HeldVersion]:
    """Let one rollout server keep `version`, or the newest if that one is gone.

    It goes on with training turns. A server that was restarted meanwhile loads the version again,
    which `tell` reports. Leaving the context lets it follow the newest version again.
    """
    server, kept = await _hold_any(services, _preferred(services, config), version)
    manifest = await manifest_of(services, kept)
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    renewing = asyncio.create_task(_renew(services, server, kept, lost, tell))
    try:
        yield HeldVersion(kept, manifest.step if manifest else 0, server, lost)
    finally:
        renewing.cancel()
        lost.cancel()
        with suppress(SeamflowError):  # the hold ends by itself
            await _update(services, server, None, 0.0)


def _preferred(services: Services, config: LauncherConfig) -> Sequence[str]:
    """Servers, those on nodes that never train first: they are never taken away."""
    trains = {node.node_id for node in config.node_plans() if "train" in node.tags}
    return sorted(services.servers, key=lambda name: (name in trains, name))


async def _hold_any(services: Services, servers: Sequence[str], version: int) -> tuple[str, int]:
    """The first server that takes the hold, and the version that it has then."""
    while True:
        for name in servers:
            for wanted in (version, None):
                try:
                    return name, await _update(services, name, wanted, _HOLD_SECONDS)
                except NotFoundError:
                    continue  # deleted meanwhile: the newest
                except SeamflowError:
                    break  # restarting, or its node trains
        await asyncio.sleep(_RETRY_SECONDS)


async def _renew(
    services: Services,
    server: str,
    version: int,
    lost: asyncio.Future[None],
    tell: Callable[[str], None],
) -> None:
    is_away = False
    while True:
        await asyncio.sleep(_RETRY_SECONDS if is_away else _RENEW_SECONDS)
        try:
            await _update(services, server, version, _HOLD_SECONDS)
        except NotFoundError as error:
            if not lost.done():
                lost.set_exception(VersionLost(str(error)))
            return
        except SeamflowError:
            is_away = True
        else:
            if is_away:
                tell(f"evaluation: {server} has weight version {version} again")
            is_away = False


async def _update(services: Services, server: str, version: int | None, seconds: float) -> int:
    hold = to_duration(seconds) if seconds else Duration()
    request = server_pb.UpdateWeightsRequest(weight_version=version, hold=hold)
    try:
        answer = await services.servers[server].UpdateWeights(request, timeout=_CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise decode(error) from error
    return answer.weight_version
