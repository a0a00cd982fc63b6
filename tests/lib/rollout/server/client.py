"""A rollout server in this process, and what its tests ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub

from rollout.server.cli import build
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.fake import fake_token, prefix_state
from services.chassis.rpc.server import started
from services.lib.token_bytes import pack_ids, unpack_ids

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub


@dataclass
class Client:
    """Calls to one server."""

    stub: RolloutServerServiceAsyncStub

    async def info(self) -> pb.GetServerInfoResponse:
        """GetServerInfo."""
        return await self.stub.GetServerInfo(pb.GetServerInfoRequest())

    async def until(self, condition: Callable[[pb.GetServerInfoResponse], bool]) -> None:
        """Ask until the server reports what `condition` wants; the test's timeout bounds it."""
        while not condition(await self.info()):
            await asyncio.sleep(0.01)

    async def serving(self, weight_version: int) -> None:
        """Wait until it serves this version."""
        await self.until(
            lambda info: (
                info.state == pb.SERVER_STATE_SERVING and info.weight_version == weight_version
            )
        )

    def generate(
        self, prefix: tuple[int, ...] = (3, 4, 5), **sampling: Any
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateTokensRequest, pb.GenerateTokensResponse]:
        """GenerateTokens, seeded, ended only by its token limit."""
        params = {"max_new_tokens": 32, "ignore_eos": True, "seed": 7} | sampling
        return self.stub.GenerateTokens(
            pb.GenerateTokensRequest(
                run_id="run",
                attempt_id="test",
                token_ids=pack_ids(prefix),
                sampling=tokens_pb2.SamplingParams(**params),
            )
        )


@asynccontextmanager
async def serving(config: RolloutServerConfig) -> AsyncIterator[Client]:
    """A server in this process, and a client of it."""
    async with (
        build(config) as service,
        started(service, config, "rollout_server") as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield Client(async_stub(RolloutServerServiceStub, channel))


def fake_config(**fields: Any) -> RolloutServerConfig:
    """A server of run "run" with the fake engine."""
    defaults: dict[str, Any] = {"engine": "fake", "run_id": "run", "server_id": "s1", "port": 0}
    return RolloutServerConfig(**(defaults | {"fake_vocab_size": 64} | fields))


async def read(stream: Any) -> tuple[list[int], list[int], int]:
    """Return a stream's tokens, the version of each, and its finish reason, checking its spans."""
    token_ids: list[int] = []
    versions: list[int] = []
    finish = tokens_pb2.FINISH_REASON_UNSPECIFIED
    async for response in stream:
        assert finish == tokens_pb2.FINISH_REASON_UNSPECIFIED
        tokens, finish = response.tokens, response.finish_reason
        assert len(tokens.token_ids) == len(tokens.logprobs)
        token_ids += unpack_ids(tokens.token_ids)
        for span in tokens.spans:
            assert span.origin == tokens_pb2.ORIGIN_POLICY
            assert span.version_source == tokens_pb2.VERSION_SOURCE_ENGINE
            assert span.server_id == "s1"
            versions += [span.weight_version] * span.num_tokens
    assert len(versions) == len(token_ids)
    return token_ids, versions, finish


def expected_tokens(prefix: tuple[int, ...], versions: list[int]) -> list[int]:
    """What the fake engine gives after `prefix` under these versions."""
    tokens: list[int] = []
    for version in versions:
        state = prefix_state((*prefix, *tokens))
        tokens.append(fake_token(state, version, 7, 64, 64))
    return tokens
