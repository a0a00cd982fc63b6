"""Who may call what: every rpc of the contract, tried by every caller over real gRPC."""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from seamflow.channel import connect
from seamflow.credentials import Credentials

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.chassis.rpc import permissions
from services.chassis.rpc.permissions import PERMISSIONS, ROLLOUT, Role, check_entries
from services.chassis.rpc.server import Service, started

ROOT = Path(__file__).parents[3]
TOKENS: dict[Role | None, str | None] = {None: None, **{role: f"{role}-secret" for role in Role}}
ALL_THREE = ServerConfig(
    token=TOKENS[Role.SERVICE],
    agent_token=TOKENS[Role.AGENT],
    operator_token=TOKENS[Role.OPERATOR],
    drain_seconds=0,
)


def services() -> Iterator[tuple[ServiceDescriptor, Any]]:
    """All services of the contract, each with its generated module."""
    for proto in sorted((ROOT / "protos").rglob("*_service.proto")):
        name = ".".join(proto.relative_to(ROOT / "protos").with_suffix("").parts)
        grpc_module = importlib.import_module(f"{name}_pb2_grpc")
        for service in importlib.import_module(f"{name}_pb2").DESCRIPTOR.services_by_name.values():
            yield service, grpc_module


METHODS = [method for service, _ in services() for method in service.methods]


def stand_in(service: ServiceDescriptor, module: Any) -> tuple[Any, Any]:
    """A servicer that answers every call with an empty response."""

    def answering(method: MethodDescriptor) -> Any:
        response = GetMessageClass(method.output_type)

        async def unary(self: Any, request: Any, context: Any) -> Any:
            return response()

        async def streamed(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
            yield response()

        return streamed if method.server_streaming else unary

    methods = {method.name: answering(method) for method in service.methods}
    base = getattr(module, f"{service.name}Servicer")
    add = getattr(module, f"add_{service.name}Servicer_to_server")
    return add, type(service.name, (base,), methods)()


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[str]:
    """Every service of the contract on one port."""
    servicers = [stand_in(service, module) for service, module in services()]
    async with started(Service(servicers), config) as port:
        yield f"127.0.0.1:{port}"


async def code_of(channel: grpc.aio.Channel, method: MethodDescriptor) -> grpc.StatusCode:
    """How a call with an empty request ends."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        sends = "stream" if method.client_streaming else "unary"
        returns = "stream" if method.server_streaming else "unary"
        make: Any = getattr(channel, f"{sends}_{returns}")
        call = make(path)(iter([b""]) if method.client_streaming else b"")
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def expected(method: MethodDescriptor, role: Role | None) -> grpc.StatusCode:
    """By the table."""
    allowed = permissions_of(method)
    if role is None:
        return grpc.StatusCode.UNAUTHENTICATED
    if role in allowed or allowed == ROLLOUT:
        return grpc.StatusCode.OK
    return grpc.StatusCode.PERMISSION_DENIED


async def outcomes(config: ServerConfig) -> dict[tuple[str, Role | None], grpc.StatusCode]:
    """Every rpc, called with every token."""
    found = {}
    async with serving(config) as address:
        for role, token in TOKENS.items():
            async with connect(address, Credentials(token=token)) as channel:
                for method in METHODS:
                    found[method.full_name, role] = await code_of(channel, method)
    return found


async def test_each_rpc_is_open_to_its_roles_alone() -> None:
    """Every cell of rpcs x callers, streams too."""
    found = await outcomes(ALL_THREE)
    table = {(m.full_name, role): expected(m, role) for m in METHODS for role in TOKENS}
    assert found == table
    assert any(method.server_streaming for method in METHODS)
    print(json.dumps({"permission_cells_tried": len(found)}))


async def test_without_tokens_everything_is_open() -> None:
    """Negative control: on loopback, without configuration, no caller is asked."""
    assert set((await outcomes(ServerConfig(drain_seconds=0))).values()) == {grpc.StatusCode.OK}


async def test_one_token_plays_every_role() -> None:
    """With `token` alone, agents and operators use it; nobody else gets in."""
    found = await outcomes(ServerConfig(token=TOKENS[Role.SERVICE], drain_seconds=0))
    assert {code for (_, role), code in found.items() if role is Role.SERVICE} == {
        grpc.StatusCode.OK
    }
    ok = grpc.StatusCode.OK
    strangers = {name for (name, role), code in found.items() if role is Role.AGENT and code is ok}
    assert strangers == {m.full_name for m in METHODS if permissions_of(m) == ROLLOUT}


def permissions_of(method: MethodDescriptor) -> frozenset[Role]:
    """The method's entry."""
    return PERMISSIONS[method.containing_service.full_name][method.name]


def test_agents_may_call_the_gateway_alone() -> None:
    """An agent's token opens no other service, and no rpc of a rollout by itself."""
    opened = {
        (service.rpartition(".")[2], rpc)
        for service, rpcs in PERMISSIONS.items()
        for rpc, roles in rpcs.items()
        if Role.AGENT in roles
    }
    names = ("LeaseRollouts", "StartRollout", "GetRun", "GetModel", "Tokenize")
    assert opened == {("RolloutService", name) for name in names}


def test_operators_may_read_everything_and_change_what_is_theirs() -> None:
    """Reads are open to operators; what destroys or overrules is not open to services."""
    for service, rpcs in PERMISSIONS.items():
        for rpc, roles in rpcs.items():
            if rpc.startswith(("Get", "List", "Watch")) and roles != ROLLOUT:
                assert Role.OPERATOR in roles, (service, rpc)
    own = {rpc for rpcs in PERMISSIONS.values() for rpc, r in rpcs.items() if r == {Role.OPERATOR}}
    assert own == {
        *("DeleteRun", "DeleteTrajectories"),
        *("RequeueDeadLetters", "SetRunPolicy", "SaveCheckpoint"),
    }


def test_each_rpc_of_the_contract_has_an_entry_and_no_other() -> None:
    """A new rpc names its callers; an entry without an rpc goes."""
    entries = {(s.rpartition(".")[2], rpc) for s, rpcs in PERMISSIONS.items() for rpc in rpcs}
    contract = {(method.containing_service.name, method.name) for method in METHODS}
    assert entries == contract
    check_entries(service.full_name for service, _ in services())


async def test_an_rpc_without_an_entry_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a server with an unlisted rpc does not serve, and says which."""
    shorter = {**PERMISSIONS, "seamflow.trainer.v1.TrainerService": {}}
    monkeypatch.setattr(permissions, "PERMISSIONS", shorter)
    with pytest.raises(ConfigError, match="TrainerService/Suspend"):
        async with serving(ServerConfig()):
            pass


async def test_a_refusal_names_role_rpc_and_who_may() -> None:
    """The text is enough to find the right token."""
    agent = Credentials(token=TOKENS[Role.AGENT])
    async with serving(ALL_THREE) as address, connect(address, agent) as channel:
        call: Any = channel.unary_unary("/seamflow.scheduler.v1.SchedulerService/DrainNode")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"")
    assert refused.value.details() == (
        "the agent token does not open /seamflow.scheduler.v1.SchedulerService/DrainNode: present "
        "the token of the operator or service role"
    )
