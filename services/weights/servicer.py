"""`WeightService`: rpcs in terms of the store and the version folders."""
# ruff: noqa: N802 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc.aio
from seamflow.durations import to_duration, to_timestamp
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceServicer

from services.chassis import metrics
from services.chassis.errors import ServiceError, already_exists, not_found
from services.chassis.log import get_logger
from services.chassis.rpc import fields, tracing
from services.lib.weight_files.shard_chunks import send_shards
from services.weights import validation
from services.weights.keys import Publish, Scope
from services.weights.redis_store import RedisStore
from services.weights.upload_receiver import UploadReceiver
from services.weights.version_feed import AnnouncedVersions, VersionFeed
from services.weights.version_folders import WeightFolders

Context = grpc.aio.ServicerContext[Any, Any]

_RELAYS = "relays"
_LOST = "lost_relays"
_SWAP_TTL = 60.0
_RELAY_TREES = 4
"""Broadcast trees among relaying rollout servers; a version's files are spread over them."""
_RELAY_FANOUT = 2
"""Most servers that one server sends a file to."""
_RELAY_SECONDS = 60.0
"""Time without a request after which a rollout server is no source for others."""


class WeightServicer(WeightServiceServicer):
    """Publishing, reading, watching.

    Args:
        keep_versions: newest committed versions whose files stay.
        offer_folder: whether callers that see the same folder may use it.
        clock: Unix time, for commit times.
    """

    def __init__(
        self,
        *,
        store: RedisStore,
        folders: WeightFolders,
        feed: VersionFeed,
        keep_versions: int,
        offer_folder: bool,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._folders = folders
        self._feed = feed
        self._keep_versions = keep_versions
        self._offer_folder = offer_folder
        self._clock = clock
        self._announced = AnnouncedVersions()
        self._committed = metrics.counter(
            "weights", "committed_versions_total", "Versions made visible."
        )
        self._served = metrics.counter("weights", "served_bytes_total", "Bytes of shards sent.")
        received = metrics.counter("weights", "received_bytes_total", "Bytes of shards received.")
        self._receiver = UploadReceiver(store, folders, received.inc)

    async def BeginPublish(
        self, request: pb.BeginPublishRequest, context: Context
    ) -> pb.BeginPublishResponse:
        scope = validation.scope_of(request.run_id, request.model)
        publish = Publish(
            key=fields.required("request_id", request.request_id),
            step=fields.not_negative("step", request.step),
            parent=fields.not_negative("parent_weight_version", request.parent_weight_version),
            epoch=fields.positive("epoch", request.epoch),
        )
        # Folders on disk count too: a store that lost data must not reuse their versions.
        floor = await self._folders.highest(scope)
        version = await self._store.begin(scope, publish, floor)
        await self._folders.make(scope, version)
        return pb.BeginPublishResponse(weight_version=version)

    async def UploadShards(
        self, requests: AsyncIterator[pb.UploadShardsRequest], context: Context
    ) -> pb.UploadShardsResponse:
        """Store parts of files; a slow disk slows the sender (back-pressure)."""
        return await self._receiver.receive(requests)

    async def GetUpload(
        self, request: pb.GetUploadRequest, context: Context
    ) -> pb.GetUploadResponse:
        scope = validation.scope_of(request.run_id, request.model)
        version = fields.positive("weight_version", request.weight_version)
        validation.check_files(request.files)
        manifest = await self._store.manifest(scope, version)
        committed = [] if manifest is None else list(manifest.files)
        response = pb.GetUploadResponse()
        for file in request.files:
            held = (
                file.num_bytes if file in committed else await self._folders.uploaded(scope, file)
            )
            if held is not None:
                response.files.add(name=file.name, num_bytes=held)
        return response

    async def ProbeFolder(
        self, request: pb.ProbeFolderRequest, context: Context
    ) -> pb.ProbeFolderResponse:
        scope = validation.scope_of(request.run_id, request.model)
        version = fields.positive("weight_version", request.weight_version)
        if await self._store.allocation(scope, version) is None:
            raise not_found("weight_version", str(version))
        if not self._offer_folder:
            return pb.ProbeFolderResponse()
        response = pb.ProbeFolderResponse(
            folder=str(self._folders.path(scope, version)),
            probe=await self._folders.probe(scope, version),
        )
        if request.HasField("written"):
            validation.check_probe(request.written)
            response.seen = await self._folders.sees(scope, version, request.written)
        return response

    async def AnnounceFiles(
        self, request: pb.AnnounceFilesRequest, context: Context
    ) -> pb.AnnounceFilesResponse:
        scope = validation.scope_of(request.run_id, request.model)
        version = fields.positive("weight_version", request.weight_version)
        epoch = fields.positive("epoch", request.epoch)
        validation.check_files(request.files)
        await self._store.fence(scope, epoch, version)
        allocation = await self._store.allocation(scope, version)
        committed = await self._store.manifest(scope, version)
        if committed is None and allocation is not None:
            await self._folders.offer(scope, version, request.files)
            self._announced.add(scope, version, allocation, request.files)
            self._feed.wake(scope)
        elif committed is None or not all(file in committed.files for file in request.files):
            raise already_exists("weight_version", str(version))
        return pb.AnnounceFilesResponse()

    async def CommitPublish(
        self, request: pb.CommitPublishRequest, context: Context
    ) -> pb.CommitPublishResponse:
        scope = validation.scope_of(request.run_id, request.model)
        version = fields.positive("weight_version", request.weight_version)
        epoch = fields.positive("epoch", request.epoch)
        validation.check_files(request.files)
        manifest = await self._store.manifest(scope, version)
        repeated = manifest is not None
        if manifest is None:
            manifest = await self._prepared(scope, request)
        stands = await self._store.commit(scope, epoch, manifest)
        if list(stands.files) != list(request.files):
            raise already_exists("weight_version", str(version))
        if not repeated:
            await self._made_visible(scope, stands)
        return pb.CommitPublishResponse(manifest=stands)

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: Context
    ) -> pb.GetManifestResponse:
        scope = validation.scope_of(request.run_id, request.model)
        if request.HasField("weight_version"):
            return pb.GetManifestResponse(manifest=await self._get(scope, request.weight_version))
        return pb.GetManifestResponse(manifest=await self._newest(scope))

    async def FetchShards(  # type: ignore[override]
        self, request: pb.FetchShardsRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Stream files; a slow reader slows the disk reads (back-pressure)."""
        scope, version = validation.scope_of(request.run_id, request.model), request.weight_version
        manifest = await self._offered(scope, version)
        open_shard = partial(self._folders.open, scope, version)
        with self._folders.reading(scope, version):
            async with aclosing(send_shards(request, manifest.files, open_shard)) as messages:
                async for message, sent in messages:
                    self._served.inc(sent)
                    yield message

    async def RequestSources(
        self, request: pb.RequestSourcesRequest, context: Context
    ) -> pb.RequestSourcesResponse:
        scope = validation.scope_of(request.run_id, request.model)
        address, zone = request.address, validation.zone(request.zone)
        if address:
            registered = member(zone, fields.required("address", address))
            await self._store.join(scope, _RELAYS, registered, ttl=_RELAY_SECONDS)
            await self._store.leave(scope, _LOST, registered)
        if request.lost_address:
            gone = member(zone, fields.required("lost_address", request.lost_address))
            await self._store.join(scope, _LOST, gone, ttl=_RELAY_SECONDS)
        response = pb.RequestSourcesResponse(ttl=to_duration(_RELAY_SECONDS))
        if not request.weight_version:
            return response
        manifest = await self._offered(scope, request.weight_version)
        servers = servers_of_zone(await self._store.members(scope, _RELAYS), zone)
        lost = servers_of_zone(await self._store.members(scope, _LOST), zone)
        shape = {"trees": _RELAY_TREES, "fanout": _RELAY_FANOUT}
        for tree, file in enumerate(manifest.files):
            source = parent(servers, address, tree=tree, **shape, lost=lost)
            response.files.add(name=file.name, address=source or "")
        return response

    async def AcquireSwap(
        self, request: pb.AcquireSwapRequest, context: Context
    ) -> pb.AcquireSwapResponse:
        """Grant it: servers up to 0.2.0 may ask, when they swap a few at a time."""
        return pb.AcquireSwapResponse(granted=True, ttl=to_duration(_SWAP_TTL))

    async def ReleaseSwap(
        self, request: pb.ReleaseSwapRequest, context: Context
    ) -> pb.ReleaseSwapResponse:
        """Nothing is held."""
        return pb.ReleaseSwapResponse()

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        """Send the newest version whenever it is above the last one sent, and announced files."""
        scope = validation.scope_of(request.run_id, request.model)
        after = fields.not_negative("after_weight_version", request.after_weight_version)
        sent: pb.Manifest | None = None

        def announced() -> pb.Manifest | None:
            found = self._announced.newest(scope, above=after) if request.with_announced else None
            return None if found is sent else found

        while True:
            newest = await self._feed.newer(scope, after, lambda: announced() is not None)
            if newest <= after:
                sent = announced() or sent
                yield pb.WatchVersionsResponse(announced=sent)
                continue
            after = newest
            manifest = await self._store.manifest(scope, after)
            if manifest is not None:  # else already deleted after newer commits
                yield pb.WatchVersionsResponse(manifest=manifest)

    async def _prepared(self, scope: Scope, request: pb.CommitPublishRequest) -> pb.Manifest:
        """The manifest, after its files were verified and made durable."""
        version = request.weight_version
        allocation = await self._store.allocation(scope, version)
        if allocation is None:
            raise not_found("weight_version", str(version))
        await self._folders.verify(scope, version, request.files)
        committed = to_timestamp(self._clock())
        return pb.Manifest(
            run_id=scope.run_id,
            model=scope.model,
            weight_version=version,
            step=allocation.step,
            parent_weight_version=allocation.parent,
            files=request.files,
            commit_time=committed,
            traceparent=tracing.traceparent() or "",
        )

    async def _made_visible(self, scope: Scope, manifest: pb.Manifest) -> None:
        self._committed.inc()
        self._announced.forget(scope, manifest.weight_version)
        self._feed.announce(scope, manifest.weight_version)
        get_logger().info(
            "committed",
            run_id=scope.run_id,
            model=scope.model,
            weight_version=manifest.weight_version,
            step=manifest.step,
        )
        try:
            oldest = await self._store.forget(scope, self._keep_versions)
            await self._folders.prune(scope, oldest)
        except ServiceError as error:
            # The version is committed. Remaining files are deleted after the next commit.
            get_logger().warning("prune_failed", reason=error.reason, detail=error.message)

    async def _newest(self, scope: Scope) -> pb.Manifest | None:
        # Bounded by commits: a manifest is deleted only after newer ones are committed.
        while version := await self._store.newest(scope):
            if manifest := await self._store.manifest(scope, version):
                return manifest
        return None

    async def _get(self, scope: Scope, version: int) -> pb.Manifest:
        manifest = await self._store.manifest(scope, version)
        if manifest is None:
            raise not_found("weight_version", str(version))
        return manifest

    async def _offered(self, scope: Scope, version: int) -> pb.Manifest:
        """The manifest of a committed version, or the announced files of another; or NOT_FOUND."""
        committed = await self._store.manifest(scope, version)
        manifest = committed or self._announced.get(scope, version)
        if manifest is None:
            raise not_found("weight_version", str(version))
        return manifest


_SEPARATOR = "|"
"""Between zone and address; an older service takes the whole for an address, which none has."""


def member(zone: str, address: str) -> str:
    """How a server of a zone is registered."""
    return f"{zone}{_SEPARATOR}{address}" if zone else address


def servers_of_zone(members: Sequence[str], zone: str) -> list[str]:
    """Addresses of the registered servers of a zone, sorted."""
    pairs = (each.rpartition(_SEPARATOR) for each in members)
    return sorted(address for found, _, address in pairs if found == zone)


def parent(
    servers: Sequence[str],
    server: str,
    *,
    tree: int,
    trees: int,
    fanout: int,
    lost: Collection[str] = (),
) -> str | None:
    """The source of `server` in `tree` of `trees`; None: the weights service.

    Several broadcast trees over the same servers (StreamRL, arXiv 2504.15930, section 5): a tree is
    a heap whose order is the sorted servers, rotated, so that each has another root and other inner
    nodes. File `i` of a version travels down tree `i mod trees`: all uplinks share the work. Trees
    are a function of the live servers; one that joins or leaves changes a few edges of the next
    version. Each zone has trees of its own: about one copy of a file travels over a slow link.

    A source comes before whom it sends to in the order of the tree, also when some are lost: who
    asked before and who asks after never wait for each other.

    Args:
        servers: all registered servers, sorted; one that is not among them has no parent.
        server: the one that fetches.
        tree: 0 or more; counted modulo `trees`.
        trees: number of trees, limited to the number of servers.
        fanout: maximum children of a server in one tree.
        lost: those of `servers` that cannot be reached. Instead of one of them its own source
            sends; if all sources up to the root are lost, the first server that is left.
    """
    if server not in servers:
        return None
    trees = min(trees, len(servers))
    start = (tree % trees) * len(servers) // trees
    order = [*servers[start:], *servers[:start]]
    place = order.index(server)
    while place and order[place := (place - 1) // fanout] in lost:
        pass
    source = order[place]
    if source in lost:
        source = next(each for each in order if each not in lost or each == server)
    return None if source == server else source
