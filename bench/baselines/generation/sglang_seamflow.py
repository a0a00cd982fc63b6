"""Everything of seamflow in front of a running SGLang: rollout server, gateway, recording."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from safetensors.torch import load_file
from seamflow import Client
from seamflow.channel import connect
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.retry import retrying
from seamflow.rollout.v1.rollout_service_pb2 import TokenChunk
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2, trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from bench.baselines.generation.sglang_raw import OnTokens, TurnOf
from bench.harness import processes
from bench.harness.redis_process import FAST, redis_server
from bench.rollout.held_weights import held_weights
from trainer.publish.publisher import Publisher

_RUN = "bench"


class Seamflow:
    """An agent's client, and a trainer's: both sides of what runs between them."""

    def __init__(self, gateway: str, channel: grpc.aio.Channel, model: Path) -> None:
        self._client = Client(gateway, run_id=_RUN)
        self._publisher = Publisher(channel, _RUN, model, model / "upload")
        self._tensors = load_file(model / "model.safetensors")
        self.version = 0
        """The newest that was published."""

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[TurnOf]:
        """A rollout, recorded from its start to its reward."""
        rollout = await self._client.start_rollout()

        async def turn(prompt: Sequence[int], max_new_tokens: int, on_tokens: OnTokens) -> None:
            def pass_on(chunk: TokenChunk) -> None:
                spans = chunk.tokens.spans
                if spans:
                    on_tokens(len(chunk.tokens.token_ids), spans[-1].weight_version)

            await rollout.generate(
                token_ids=prompt,
                sampling=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
                on_tokens=pass_on,
            )

        yield turn
        await rollout.finish(0.0)

    async def publish(self) -> None:
        """Commit a new version, as a trainer does; SGLang takes it up while turns go on."""
        self.version += 1
        await self._publisher.publish(
            held_weights(self._tensors), step=self.version, parent=self.version - 1, epoch=1
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()


@asynccontextmanager
async def seamflow_before(url: str, model: Path, folder: Path) -> AsyncIterator[Seamflow]:
    """All processes a rollout needs, in front of the SGLang at `url`."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(redis_server(FAST))
        manager = stack.enter_context(processes.manager(folder, redis_url, durability="fast"))
        weights = stack.enter_context(
            processes.service(
                *("services.weights", "weights", folder),
                folder=folder / "weights",
                redis_url=redis_url,
            )
        )
        server = processes.service(
            "rollout.server",
            "rollout_server",
            folder,
            engine="sglang",
            sglang_url=url,
            model=model,
            run_id=_RUN,
            weights=weights.address,
            cache_folder=folder / "cache",
        )
        stack.enter_context(server)
        gateway = processes.service(
            "rollout.gateway",
            "rollout_gateway",
            folder,
            run_id=_RUN,
            model=model,
            trajectory_manager=manager.address,
            servers=server.address,
            weights=weights.address,
        )
        stack.enter_context(gateway)
        await _create_run(manager.address)
        async with (
            connect(weights.address) as channel,
            Seamflow(gateway.address, channel, model) as seamflow,
        ):
            yield seamflow


async def _create_run(manager: str) -> None:
    config = trajectory_pb2.RunConfig(
        group_size=1,
        groups_per_step=1,
        max_staleness=1,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
        lease_duration=Duration(seconds=60),
        durability=trajectory_pb2.DURABILITY_FAST,
    )
    request = run_service_pb2.CreateRunRequest(run_id=_RUN, config=config)
    async with connect(manager) as channel:
        stub = async_stub(RunServiceStub, channel)
        await retrying(lambda: stub.CreateRun(request))
