"""Who may call what: every rpc of the contract, tried by every caller over real gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from services.chassis.rpc.identities import SERVICES, URI, Identity
from services.chassis.rpc.permissions import PERMISSIONS, ROLLOUT, Permissions, check_entries
from services.chassis.rpc.server import Service, started
from tests.lib.certificates import Authority, Certificate

ROOT = Path(__file__).parents[5]
OK, STRANGER, DENIED, NO_CONNECTION = (
    grpc.StatusCode.OK,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
)
A, T, X = Identity.AGENT, Identity.TRAINER, Identity.OPERATOR
ANY_SERVICE = "any-service-secret"


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


def token_of(identity: Identity) -> str:
    """Its own."""
    return f"{identity}-secret"


def configured(folder: Path, **settings: Any) -> ServerConfig:
    """A server that knows everyone, by certificate and by token."""
    tokens = folder / "tokens"
    tokens.mkdir()
    (tokens / "service").write_text(ANY_SERVICE)
    for service in SERVICES:
        (tokens / service).write_text(token_of(service))
    # The operators' token is not known here, only its digest.
    digest = hashlib.sha256(token_of(X).encode()).hexdigest()
    known: dict[str, Any] = {
        "service_tokens_folder": tokens,
        "certificate_identities": "tls_ca_file" in settings,
        "operator_token": f"sha256:{digest}",
        "agent_token": token_of(A),
        "drain_seconds": 0,
    }
    return ServerConfig(**{**known, **settings})


@dataclass(frozen=True)
class Column:
    """A caller of the table."""

    credentials: Credentials
    identities: Set[Identity] = frozenset()
    """Who it is; none: it is refused with `otherwise`."""
    otherwise: grpc.StatusCode = STRANGER

    def expected(self, method: MethodDescriptor) -> grpc.StatusCode:
        """By the table."""
        allowed = permissions_of(method)
        if self.otherwise is NO_CONNECTION:
            return NO_CONNECTION
        if allowed == ROLLOUT and (self.identities or self.credentials.token):
            return OK
        if not self.identities:
            return STRANGER
        return OK if self.identities & allowed else DENIED


def columns(folder: Path) -> tuple[Certificate, dict[str, Column]]:
    """The server's certificate, and every caller by name."""
    ours, foreign = Authority(folder), Authority(folder, "foreign")

    def shown(certificate: Certificate, token: str | None = None) -> Credentials:
        return Credentials(
            token=token,
            ca_file=ours.ca_file,
            cert_file=certificate.cert_file,
            key_file=certificate.key_file,
        )

    def column(certificate: Certificate, token: str | None, *identities: Identity) -> Column:
        return Column(shown(certificate, token), frozenset(identities))

    unnamed = ours.issue("unnamed")
    of = {each: ours.issue(each, f"{URI}{each}") for each in Identity}
    expired, alien = ours.issue("old", f"{URI}{T}", valid=False), foreign.issue("x", f"{URI}{T}")
    unknown, elsewhere = ours.issue("u", f"{URI}redis"), ours.issue("e", "spiffe://corp/trainer")
    every = frozenset(SERVICES)
    return ours.issue("server"), {
        "nothing": column(unnamed, None),
        "wrong token": column(unnamed, "guess"),
        "wrong token, right certificate": column(of[T], "guess"),
        "expired certificate": Column(shown(expired, token_of(T)), every, NO_CONNECTION),
        "foreign authority": Column(shown(alien, token_of(T)), every, NO_CONNECTION),
        "certificate of an unknown service": column(unknown, None),
        "the same with the token of any service": column(unknown, ANY_SERVICE),
        "token of another service than the certificate": column(of[Identity.RANKER], token_of(T)),
        "token of any service": column(unnamed, ANY_SERVICE, *SERVICES),
        "token of any service, certificate of one": column(of[T], ANY_SERVICE, T),
        "agent through the HTTP gateway": column(of[Identity.HTTP_GATEWAY], token_of(A), A),
        "another domain's certificate": column(elsewhere, token_of(T), T),
        **{f"certificate of {each}": column(of[each], None, each) for each in Identity},
        **{f"token of {each}": column(unnamed, token_of(each), each) for each in Identity},
        **{f"both of {each}": column(of[each], token_of(each), each) for each in (A, T, X)},
    }


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


async def outcomes(
    config: ServerConfig, callers: Mapping[str, Credentials]
) -> dict[tuple[str, str], grpc.StatusCode]:
    """Every rpc, called by every caller: (caller, rpc) -> how it ends."""
    found = {}
    async with serving(config) as address:
        for name, credentials in callers.items():
            async with connect(address, credentials) as channel:
                codes = await asyncio.gather(*(code_of(channel, method) for method in METHODS))
            found.update({(name, m.full_name): c for m, c in zip(METHODS, codes, strict=True)})
    return found


async def test_each_rpc_is_open_to_its_callers_alone(tmp_path: Path) -> None:
    """Every cell of rpcs x callers, streams too."""
    server, callers = columns(tmp_path)
    config = configured(tmp_path, **server.settings)
    found = await outcomes(config, {name: each.credentials for name, each in callers.items()})
    table = {(n, m.full_name): each.expected(m) for n, each in callers.items() for m in METHODS}
    assert {cell: found[cell] for cell in table if found[cell] != table[cell]} == {}
    assert set(table.values()) == {OK, STRANGER, DENIED, NO_CONNECTION}
    assert any(method.server_streaming for method in METHODS)
    print(json.dumps({"permission_cells_tried": len(found)}))


async def test_with_the_check_off_cells_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the interceptor's check, all that connect may do everything."""
    monkeypatch.setattr(Permissions, "check", lambda *_: None)
    server, callers = columns(tmp_path)
    config = configured(tmp_path, **server.settings)
    some = {name: callers[name].credentials for name in ("nothing", "certificate of ranker")}
    found = await outcomes(config, some)
    assert set(found.values()) == {OK}
    denied = [m for m in METHODS if callers["certificate of ranker"].expected(m) is DENIED]
    assert len(denied) > len(METHODS) / 2


async def test_without_tokens_everything_is_open() -> None:
    """On loopback, without configuration, no caller is asked."""
    found = await outcomes(ServerConfig(drain_seconds=0), {"anyone": Credentials()})
    assert set(found.values()) == {OK}


async def test_one_token_plays_every_role() -> None:
    """With `token` alone, services, agents and operators use it; nobody else gets in."""
    config = ServerConfig(token=ANY_SERVICE, drain_seconds=0)
    shown = {"all": Credentials(token=ANY_SERVICE), "stranger": Credentials(token="guess")}
    found = await outcomes(config, shown)
    assert {code for (name, _), code in found.items() if name == "all"} == {OK}
    open_to_strangers = {rpc for (name, rpc), c in found.items() if name == "stranger" and c is OK}
    assert open_to_strangers == {m.full_name for m in METHODS if permissions_of(m) == ROLLOUT}


async def test_a_certificate_alone_is_asked_for_its_token_unless_configured(tmp_path: Path) -> None:
    """`certificate_identities` is off by default: who has a certificate still needs a token."""
    server, callers = columns(tmp_path)
    config = configured(tmp_path, **server.settings, certificate_identities=False)
    found = await outcomes(config, {"c": callers["certificate of trainer"].credentials})
    assert set(found.values()) == {STRANGER}


def permissions_of(method: MethodDescriptor) -> Set[Identity]:
    """The method's entry."""
    return PERMISSIONS[method.containing_service.full_name][method.name]


def test_agents_may_call_the_gateway_alone() -> None:
    """An agent's token opens no other service, and no rpc of a rollout by itself."""
    opened = {
        (service.rpartition(".")[2], rpc)
        for service, rpcs in PERMISSIONS.items()
        for rpc, callers in rpcs.items()
        if A in callers
    }
    names = ("LeaseRollouts", "StartRollout", "GetRun", "GetModel", "Tokenize")
    assert opened == {("RolloutService", name) for name in names}


def test_operators_may_read_everything_and_change_what_is_theirs() -> None:
    """Reads are open to operators; what destroys or overrules is not open to services."""
    for service, rpcs in PERMISSIONS.items():
        for rpc, callers in rpcs.items():
            if rpc.startswith(("Get", "List", "Watch")) and callers != ROLLOUT:
                assert X in callers, (service, rpc)
    destructive = ("DeleteRun", "DeleteTrajectories", "RequeueDeadLetters", "SetRunPolicy")
    for name in destructive:
        assert [rpcs[name] for rpcs in PERMISSIONS.values() if name in rpcs] == [{X}]


def test_what_one_identity_alone_may_do() -> None:
    """The ledger is the trainer's, recording the gateway's, suspension the node agents'."""
    alone: dict[Identity, set[str]] = defaultdict(set)
    for rpcs in PERMISSIONS.values():
        for rpc, callers in rpcs.items():
            if len(callers) == 1:
                alone[next(iter(callers))].add(rpc)
    ledger = {"Reconcile", "LeaseSamples", "ExtendLease", "CommitStep", "BeginPublish"}
    assert ledger <= alone[T]
    assert {"BeginTurns", "AppendTokens", "LeaseTasks"} <= alone[Identity.ROLLOUT_GATEWAY]
    assert {"Suspend", "RegisterNode", "ReleaseMemory"} <= alone[Identity.NODE_AGENT]


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


async def test_a_refusal_names_caller_rpc_and_who_may(tmp_path: Path) -> None:
    """The text is enough to find the right token."""
    agent = Credentials(token=token_of(A))
    async with serving(configured(tmp_path)) as address, connect(address, agent) as channel:
        call: Any = channel.unary_unary("/seamflow.scheduler.v1.SchedulerService/DrainNode")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"")
    assert refused.value.details() == (
        "agent may not call /seamflow.scheduler.v1.SchedulerService/DrainNode: only launcher or "
        "operator may"
    )
