"""Errors of a service behind a service, over real gRPC: nothing that a caller needs is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from seamflow import errors
from seamflow.channel import MAX_MESSAGE_BYTES, connect
from seamflow.errors import FieldViolation, SeamflowError, decode
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from seamflow.stubs import async_stub

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import Reason, ServiceError, invalid_argument, not_found
from services.chassis.rpc.server import Service, started
from services.chassis.rpc.status import from_dependency

VIOLATIONS = (FieldViolation("sampling.top_p", "0 to 1"), FieldViolation("seed", "not negative"))
FAILURES = {
    "exhausted": ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.TOO_MANY_REQUESTS,
        "the queue is full",
        metadata={"num_free": "0"},
        retry_after=2.5,
    ),
    "invalid": ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_FIELD,
        "two fields are wrong",
        violations=VIOLATIONS,
    ),
    "stale": ServiceError(
        grpc.StatusCode.ABORTED,
        Reason.STALE_EPOCH,
        "epoch 3 is stale",
        metadata={"current_epoch": "4"},
    ),
    "newer": ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION, Reason("REASON_OF_A_NEWER_RELEASE"), "not now"
    ),
    "silent": ServiceError(grpc.StatusCode.PERMISSION_DENIED, Reason.PERMISSION_DENIED, "no"),
}


class Failing(pb_grpc.RolloutServiceServicer):
    """Fails as the rollout's id says."""

    async def StartRollout(self, request: Any, context: Any) -> Any:
        """Unary."""
        if request.rollout_id in FAILURES:
            raise FAILURES[request.rollout_id]
        if request.run_id == "limits":
            raise invalid_argument("rollout_id", request.rollout_id, "at most 200 characters")
        raise not_found("rollout", request.rollout_id)


class Forwarding(pb_grpc.RolloutServiceServicer):
    """Asks another server, and passes its failures on."""

    def __init__(self, target: str, convert: bool) -> None:
        self._target, self._convert = target, convert

    async def StartRollout(self, request: Any, context: Any) -> Any:
        """Unary."""
        async with connect(self._target) as channel:
            stub = async_stub(pb_grpc.RolloutServiceStub, channel)
            try:
                return await stub.StartRollout(request)
            except grpc.aio.AioRpcError as error:
                if not self._convert:
                    raise
                raise from_dependency(decode(error)) from error


@asynccontextmanager
async def serving(servicer: Any) -> AsyncIterator[str]:
    """Serve; yields the address."""
    service = Service([(pb_grpc.add_RolloutServiceServicer_to_server, servicer)])
    async with started(service, ServerConfig()) as port:
        yield f"127.0.0.1:{port}"


async def failure(target: str, rollout_id: str, run_id: str = "") -> SeamflowError:
    """What StartRollout raises."""
    async with connect(target) as channel:
        stub = async_stub(pb_grpc.RolloutServiceStub, channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.StartRollout(pb.StartRolloutRequest(run_id=run_id, rollout_id=rollout_id))
    return decode(raised.value)


def facts(error: SeamflowError) -> tuple[object, ...]:
    """Everything that a caller may need."""
    own = {k: v for k, v in error.metadata.items() if k not in ("request_id", "trace_id")}
    return type(error), str(error), error.reason, error.retry_after, own, error.violations


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_the_same_through_a_service(name: str) -> None:
    """Class, text, reason, retry time, metadata and fields at fault: two hops are one."""
    async with serving(Failing()) as far, serving(Forwarding(far, convert=True)) as near:
        direct, through = await failure(far, rollout_id=name), await failure(near, rollout_id=name)
    assert facts(through) == facts(direct)
    assert direct.reason == FAILURES[name].reason
    assert direct.violations == FAILURES[name].violations


async def test_what_a_process_does_wrong_itself_is_its_own_bug() -> None:
    """Unconverted, a refusal of our own request is INTERNAL; back-pressure still passes."""
    async with serving(Failing()) as far, serving(Forwarding(far, convert=False)) as near:
        assert (await failure(near, rollout_id="invalid")).reason == Reason.INTERNAL
        assert (await failure(near, rollout_id="silent")).reason == Reason.INTERNAL
        direct = await failure(far, rollout_id="exhausted")
        assert facts(await failure(near, rollout_id="exhausted")) == facts(direct)


@pytest.mark.parametrize("run_id", ["limits", "names"])
async def test_a_long_name_comes_back_cut(run_id: str) -> None:
    """20,000 characters in a request are about 80 in the error, in text, metadata and fields."""
    async with serving(Failing()) as target:
        error = await failure(target, run_id=run_id, rollout_id="x" * 20_000)
        shown = [str(error), *error.metadata.values(), *(v.description for v in error.violations)]
        assert max(len(text) for text in shown) < 200
        assert "x" * 70 in str(error)


async def test_a_message_beyond_the_limit_is_refused_once() -> None:
    """gRPC's own RESOURCE_EXHAUSTED carries no RetryInfo: `retrying` calls once."""
    calls = 0

    async def call() -> Any:
        nonlocal calls
        calls += 1
        request = pb.StartRolloutRequest(rollout_id="x" * (MAX_MESSAGE_BYTES + 1))
        return await async_stub(pb_grpc.RolloutServiceStub, channel).StartRollout(request)

    async with serving(Failing()) as target, connect(target) as channel:
        with pytest.raises(errors.ExhaustedError) as raised:
            await retrying(call)
    assert (calls, raised.value.retry_after, raised.value.reason) == (1, None, "")
