"""Fetches shards from other rollout servers; the weights service sends each about once."""

from __future__ import annotations

from seamflow.errors import SeamflowError
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.weights.transport import Incoming, SourceLost, TransferError, for_each_missing
from rollout.server.weights.transports import TransportContext
from rollout.server.weights.transports.shard_stream import ShardReceiver

_NAME = "relay"
_SOURCES = 4
"""Servers that are tried for a file, one after the other."""


class Relay:
    """Fetches each file from the source that the weights service names.

    If a source fails, the service names another one, which continues from the verified prefix: in
    a zone, another leader. After `_SOURCES` of them the file is left to the next transport.
    """

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._stub = async_stub(WeightServiceStub, context.weights)
        self._receiver = ShardReceiver(_NAME, bool(context.config.weight_encodings))
        self._address = context.config.weight_relay_address or ""
        self._zone = context.config.zone

    async def fetch(self, incoming: Incoming) -> None:
        """Fetch all missing files; raises the first `TransferError` after trying each."""
        sources = await self._sources(incoming.manifest)
        failures: list[TransferError] = []

        def source(file: pb.WeightFile) -> str:
            return sources.get(file.name, "")

        async def fetch_file(file: pb.WeightFile) -> None:
            try:
                await self._fetch_from_any(incoming, file, source(file))
            except TransferError as error:
                failures.append(error)

        # A leader waits for no other before it fetches its own files: the link is never idle.
        await for_each_missing(incoming, self._context.config.weight_streams, fetch_file, source)
        if failures:
            raise failures[0]

    async def _fetch_from_any(self, incoming: Incoming, file: pb.WeightFile, source: str) -> None:
        for number in range(_SOURCES):
            try:
                await self._fetch_file(incoming, file, source)
                return
            except SourceLost:
                # From the service itself the next transport continues.
                if not source or number == _SOURCES - 1:
                    raise
            source = (await self._sources(incoming.manifest, lost=source)).get(file.name, "")

    async def _sources(self, manifest: pb.Manifest, lost: str = "") -> dict[str, str]:
        request = pb.RequestSourcesRequest(
            run_id=manifest.run_id,
            model=manifest.model,
            weight_version=manifest.weight_version,
            address=self._address,
            zone=self._zone,
            lost_address=lost,
        )
        response = await retrying(lambda: self._stub.RequestSources(request))
        return {source.name: source.address for source in response.files}

    async def _fetch_file(self, incoming: Incoming, file: pb.WeightFile, address: str) -> None:
        context = self._context
        channel = context.connect(address) if address else context.weights
        try:
            await self._receiver.receive(channel, incoming, file)
        except SeamflowError as error:
            what = f"{address or 'the weights service'}: {error}"
            cure = "the next transport continues from here"
            offset = incoming.verified(file)
            raise SourceLost(
                what, transport=_NAME, cure=cure, file=file.name, offset=offset
            ) from error
