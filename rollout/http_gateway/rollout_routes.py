"""Routes to lease, start, extend and finish rollouts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from aiohttp import web
from google.protobuf.duration_pb2 import Duration
from pydantic import Field
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of, to_duration
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2

from rollout.http_gateway.api_error import ApiError, invalid
from rollout.http_gateway.config import HttpGatewayConfig
from rollout.http_gateway.dialects.request_model import RequestModel
from rollout.http_gateway.lease_holds import LeaseHolds
from rollout.http_gateway.request_body import bearer, credential, read_body

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

T = TypeVar("T")

_CALL_SECONDS = 60.0
"""How long a call is repeated while the rollout gateway is unavailable."""
_PURPOSES = {"train": tokens_pb2.PURPOSE_TRAIN, "eval": tokens_pb2.PURPOSE_EVAL}

_Named = Annotated[dict[str, float], Field(max_length=1024)]
_Reward = float | _Named


class _Lease(RequestModel):
    max_rollouts: Annotated[int, Field(ge=1, le=8)] = 1
    wait_seconds: Annotated[float, Field(ge=0, le=60)] = 20.0
    purpose: Literal["train", "eval"] | None = None
    request_id: str | None = None
    agent_id: str = ""


class _Group(RequestModel):
    group_id: str
    size: Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Start(RequestModel):
    rollout_id: str | None = None
    group: _Group | None = None
    pinned_weight_version: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    labels: dict[str, str] | None = None


class _Failure(RequestModel):
    class_: Literal["environment", "infrastructure", "timeout", "cancelled"] = Field(alias="class")
    message: str = ""


class _Finish(RequestModel):
    rewards: _Reward | None = None
    turn_rewards: dict[str, _Reward] = Field(default_factory=dict)
    untrained_turn_ids: list[str] = Field(default_factory=list)
    policy_failure: str = ""
    truncated: bool = False
    failure: _Failure | None = None


class RolloutRoutes:
    """The requests of agents about rollouts as a whole."""

    def __init__(
        self, config: HttpGatewayConfig, stub: RolloutServiceAsyncStub, holds: LeaseHolds
    ) -> None:
        self._config = config
        self._stub = stub
        self._holds = holds

    async def lease(self, request: web.Request) -> web.Response:
        """POST /rollouts/lease: lease tasks and start a rollout for each; long poll."""
        given = _Lease.read(await read_body(request, self._config) or b"{}")
        metadata = self._agent_metadata(request)
        lease = pb.LeaseRolloutsRequest(
            run_id=self._config.run_id,
            request_id=given.request_id or uuid.uuid4().hex,
            agent_id=given.agent_id or request.remote or "",
            purpose=_PURPOSES.get(given.purpose or "", tokens_pb2.PURPOSE_UNSPECIFIED),
            wait=to_duration(given.wait_seconds),
            max_rollouts=given.max_rollouts,
        )
        answer = await _repeated(lambda: self._stub.LeaseRollouts(lease, metadata=metadata))
        rollouts = [
            self._rollout(request, r.rollout_id, r.credential, r.lease_duration, r.task)
            for r in answer.leases
        ]
        reason = trajectory_pb2.EmptyReason.Name(answer.empty_reason)
        reason = reason.removeprefix("EMPTY_REASON_").lower()
        why = None if rollouts or reason == "unspecified" else reason
        return web.json_response({"rollouts": rollouts, "empty_reason": why})

    async def start(self, request: web.Request) -> web.Response:
        """POST /rollouts: start a rollout of the agent's own task."""
        given = _Start.read(await read_body(request, self._config) or b"{}")
        metadata = self._agent_metadata(request)
        group = given.group
        start = pb.StartRolloutRequest(
            run_id=self._config.run_id,
            rollout_id=given.rollout_id or uuid.uuid4().hex,
            purpose=tokens_pb2.PURPOSE_TRAIN if group else tokens_pb2.PURPOSE_EVAL,
            group=pb.Group(group_id=group.group_id, size=group.size) if group else None,
            pinned_weight_version=given.pinned_weight_version,
            labels=given.labels,
        )
        answer = await _repeated(lambda: self._stub.StartRollout(start, metadata=metadata))
        duration = answer.lease_duration if answer.HasField("lease_duration") else None
        return web.json_response(
            self._rollout(request, answer.rollout_id, answer.credential, duration)
        )

    async def extend(self, request: web.Request) -> web.Response:
        """POST /rollouts/{id}/extend: keep the lease of a rollout that makes no calls."""
        rollout_id, shown = request.match_info["rollout_id"], credential(request)
        extend = pb.ExtendRolloutsRequest(
            run_id=self._config.run_id,
            rollouts=[pb.RolloutCredential(rollout_id=rollout_id, credential=shown)],
        )
        with self._holds.call(rollout_id, shown):
            answer = await _repeated(lambda: self._stub.ExtendRollouts(extend))
        if answer.lost_rollout_ids:
            message = f"rollout {rollout_id!r} has no lease: it has expired or ended; stop on it"
            raise ApiError(409, message, code="lease_expired")
        return web.json_response({"lease_seconds": seconds_of(answer.lease_duration)})

    async def finish(self, request: web.Request) -> web.Response:
        """POST /rollouts/{id}/finish: end a rollout with rewards or with a failure."""
        rollout_id, shown = request.match_info["rollout_id"], credential(request)
        given = _Finish.read(await read_body(request, self._config))
        finish = pb.FinishRolloutRequest(
            run_id=self._config.run_id,
            rollout_id=rollout_id,
            untrained_turn_ids=given.untrained_turn_ids,
            **_outcome(given),
        )
        metadata = (("authorization", f"Bearer {shown}"),)
        await _repeated(lambda: self._stub.FinishRollout(finish, metadata=metadata))
        self._holds.remove(rollout_id, shown)
        return web.json_response({})

    def _agent_metadata(self, request: web.Request) -> tuple[tuple[str, str], ...]:
        """The agent's own token, never this process's. Raises `ApiError`: 401, it is missing."""
        shown = bearer(request)
        if shown is None and self._config.knows_callers:
            message = 'no token: send "Authorization: Bearer <token>" with the agents\' token'
            raise ApiError(401, message, code="invalid_api_key")
        return () if shown is None else (("authorization", f"Bearer {shown}"),)

    def _rollout(
        self,
        request: web.Request,
        rollout_id: str,
        credential: str,
        lease: Duration | None,
        task: trajectory_pb2.Task | None = None,
    ) -> dict[str, Any]:
        with self._holds.call(rollout_id, credential):
            pass
        origin = self._config.public_url.rstrip("/") or f"{request.scheme}://{request.host}"
        url = f"{origin}/rollouts/{quote(rollout_id, safe='')}"
        return {
            "rollout_id": rollout_id,
            "credential": credential,
            "base_url": f"{url}/v1",
            "anthropic_base_url": url,
            "lease_seconds": None if lease is None else seconds_of(lease),
            "task": None if task is None else _task(task),
        }


def _task(task: trajectory_pb2.Task) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "payload": json.loads(task.payload_json or "{}"),
        "train": task.purpose == tokens_pb2.PURPOSE_TRAIN,
    }


def _outcome(given: _Finish) -> dict[str, Any]:
    if given.failure is not None:
        if given.rewards is not None:
            message = "failure and rewards are both given: a failed rollout has no rewards"
            raise invalid("failure", message)
        name = f"FAILURE_CLASS_{given.failure.class_.upper()}"
        failure_class = tokens_pb2.FailureClass.Value(name)
        return {
            "failure": tokens_pb2.Failure(
                failure_class=failure_class, message=given.failure.message
            )
        }
    rewards = [] if given.rewards is None else _rewards(given.rewards, "")
    for turn_id, of_turn in given.turn_rewards.items():
        rewards += _rewards(of_turn, turn_id)
    outcome = tokens_pb2.Rewards(
        rewards=rewards, policy_failure=given.policy_failure, truncated=given.truncated
    )
    return {"rewards": outcome}


def _rewards(rewards: _Reward, turn_id: str) -> list[tokens_pb2.Reward]:
    named = rewards if isinstance(rewards, dict) else {"reward": rewards}
    return [tokens_pb2.Reward(name=n, value=v, turn_id=turn_id) for n, v in named.items()]


async def _repeated(call: Callable[[], Awaitable[T]]) -> T:
    return await retrying(call, timeout=_CALL_SECONDS)
