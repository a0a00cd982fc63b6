"""Waits for the evaluation of the first weights: it would be too late once training has begun."""

from __future__ import annotations

import asyncio

import grpc.aio
from seamflow.evaluator.v1 import evaluator_service_pb2 as pb
from seamflow.evaluator.v1.evaluator_service_pb2_grpc import EvaluatorServiceStub
from seamflow.stubs import async_stub

from services.chassis.log import get_logger
from services.chassis.rpc.clients import channel
from services.dataloader.config import DataloaderConfig

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
