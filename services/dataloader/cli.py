"""Wires the dataloader together: `python -m services.dataloader`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
from seamflow.evaluator.v1 import evaluator_service_pb2 as pb
from seamflow.evaluator.v1.evaluator_service_pb2_grpc import EvaluatorServiceStub
from seamflow.stubs import async_stub

from services.chassis.log import get_logger
from services.chassis.rpc.clients import channel, credentials, with_token
from services.chassis.rpc.server import Service, run
from services.dataloader.check_tasks import check_tasks
from services.dataloader.config import DataloaderConfig
from services.dataloader.curriculum import Curriculum, GroupSizes, SuccessRates
from services.dataloader.loader import Loader
from services.dataloader.task_queue import TaskQueue
from services.lib.tasks.sources import open_source


def main() -> None:
    """Submit all tasks, then exit; a signal ends it earlier."""
    run("dataloader", DataloaderConfig, build)


@asynccontextmanager
async def build(config: DataloaderConfig) -> AsyncIterator[Service]:
    """Open the task source and the channel to the trajectory manager."""
    source = await asyncio.to_thread(
        open_source,
        config.tasks,
        shuffle=config.shuffle,
        seed=config.seed,
        credentials=with_token(credentials(config), config.environment_token),
        num_heldout=config.num_heldout,
    )
    async with channel(config, config.trajectory_manager) as manager:
        queue = TaskQueue(manager, run_id=config.run_id, clock=time.monotonic)
        rates = SuccessRates(config, manager)
        sizes = GroupSizes(config, rates) if config.max_samples else None
        curriculum = Curriculum(config, rates) if config.curriculum.share < 1 else None
        loader = await asyncio.to_thread(Loader, config, source, queue, sizes, curriculum)

        async def load() -> None:
            # Without a launcher nobody else has looked at all rows.
            if loader.is_at_start or config.broken_rows == "skip":
                _, loader.broken = await asyncio.to_thread(check_tasks, config, source)
            await await_first_evaluation(config)
            await loader.run()
            # A finished job ends like after a signal: drained, exit code 0.
            signal.raise_signal(signal.SIGTERM)

        yield Service(background=[load])


_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 5.0


async def await_first_evaluation(config: DataloaderConfig) -> None:
    """Wait until the evaluator, if there is one, is past the time before training.

    However long it does not answer: it is started again, and knows what it has evaluated.
    """
    if config.evaluator is None:
        return
    request = pb.GetEvaluationsRequest(run_id=config.run_id)
    async with channel(config, config.evaluator) as opened:
        evaluator, said = async_stub(EvaluatorServiceStub, opened), ""
        while True:
            try:
                answer = await evaluator.GetEvaluations(request, timeout=_ANSWER_SECONDS)
            except grpc.aio.AioRpcError as error:
                waits = f"no answer: {error.code().name}"
            else:
                if answer.state > pb.EVALUATOR_STATE_BEFORE_TRAINING:
                    return
                waits = pb.EvaluatorState.Name(answer.state)
            if waits != said:
                get_logger().info("evaluation_awaited", evaluator=config.evaluator, state=waits)
                said = waits
            await asyncio.sleep(_LOOK_SECONDS)
