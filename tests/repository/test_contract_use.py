"""Nothing in the contract is unused: each rpc has a caller, each service a server."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from services.chassis.rpc.identities import Identity
from services.chassis.rpc.permissions import PERMISSIONS, ROLLOUT

ROOT = Path(__file__).parents[2]
PRODUCT = (
    "sdk/seamflow",
    "services",
    "trainer",
    "rollout",
    "scheduler",
    "trajectory_manager",
)
FOR_OTHERS = {
    "seamflow.scheduler.v1.SchedulerService.PlanSplit",
    "seamflow.trajectory.v1.TrajectoryService.RecordGroups",
}
"""Rpcs of the released contract for programs of users: groups that were generated elsewhere, and
what is deprecated."""
_RUN_CLIENTS = "sdk/seamflow/inspect/clients.py"
"""Makes stubs for processes that call services by `RunClients`."""
FOR_OLDER = {
    ("seamflow.weights.v1.WeightService", "AcquireSwap"),
    ("seamflow.weights.v1.WeightService", "ReleaseSwap"),
}
"""Rpcs that only rollout servers of 0.2.0 call."""


def services() -> Iterator[ServiceDescriptor]:
    """All services of the contract."""
    for proto in sorted((ROOT / "protos").rglob("*_service.proto")):
        relative = proto.relative_to(ROOT / "protos").with_suffix("")
        module = importlib.import_module(".".join(relative.parts) + "_pb2")
        yield from module.DESCRIPTOR.services_by_name.values()


@cache
def product() -> dict[Path, ast.Module]:
    """The modules of the product, without generated ones."""
    files = [file for root in PRODUCT for file in (ROOT / root).rglob("*.py")]
    files.append(ROOT / "deploy" / "create_run.py")
    return {
        file: ast.parse(file.read_text(encoding="utf-8"))
        for file in files
        if "_pb2" not in file.name
    }


@cache
def processes() -> dict[tuple[str, ...], list[ast.Module]]:
    """The modules of each process: `trainer`, `rollout.gateway`, `services.launcher` and so on."""
    grouped: dict[tuple[str, ...], list[ast.Module]] = defaultdict(list)
    for file, tree in product().items():
        parts = file.relative_to(ROOT).parts
        grouped[parts[: 2 if parts[0] in ("rollout", "services", "sdk") else 1]].append(tree)
    shared = product()[ROOT / _RUN_CLIENTS]
    for trees in grouped.values():
        if any(uses(tree, "RunClients") for tree in trees):
            trees.append(shared)
    return grouped


class Words(NamedTuple):
    """What a module mentions."""

    loaded: frozenset[str]
    """Attributes that are read: `something.Rpc`."""
    names: frozenset[str]
    """Names and attributes, imports aside."""
    texts: frozenset[str]
    """Constants that are texts."""


@cache
def words(tree: ast.AST) -> Words:
    """All of a module."""
    nodes = list(ast.walk(tree))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    loaded = {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    texts = {value for value in constants if isinstance(value, str)}
    every = names | {node.attr for node in attributes}
    return Words(frozenset(loaded), frozenset(every), frozenset(texts))


def calls(tree: ast.AST, rpc: str) -> bool:
    """Whether `something.Rpc` is called or passed on; defining a servicer's method is no call."""
    return rpc in words(tree).loaded


def names_path(tree: ast.AST, path: str) -> bool:
    """Whether a text is exactly this path."""
    return path in words(tree).texts


def uses(tree: ast.AST, name: str) -> bool:
    """Whether a name is mentioned, imports aside."""
    return name in words(tree).names


def has_caller(method: MethodDescriptor) -> bool:
    """A process of the product makes the service's stub and calls the rpc, or calls it by path.

    The stub may be made in one module and used in another one of the process.
    """
    return any(is_called(method, trees) for trees in processes().values())


def is_called(method: MethodDescriptor, trees: Sequence[ast.Module]) -> bool:
    """Whether these modules make the service's stub and call the rpc, or call it by path."""
    stub = f"{method.containing_service.name}Stub"
    path = f"/{method.containing_service.full_name}/{method.name}"
    return any(names_path(tree, path) for tree in trees) or (
        any(uses(tree, stub) for tree in trees) and any(calls(tree, method.name) for tree in trees)
    )


def has_server(service: ServiceDescriptor) -> bool:
    """A module of the product adds a servicer of it to a server."""
    return any(uses(tree, f"add_{service.name}Servicer_to_server") for tree in product().values())


def test_every_rpc_has_a_caller() -> None:
    """What nobody calls is deleted, or given a caller."""
    methods = [method for service in services() for method in service.methods]
    assert len(methods) > 40
    uncalled = {method.full_name for method in methods if not has_caller(method)}
    older = {".".join(rpc) for rpc in FOR_OLDER}
    assert uncalled - FOR_OTHERS - older == set(), (
        "give a new rpc a caller, or a command of the CLI"
    )


def test_every_service_has_a_server() -> None:
    """What nobody serves cannot be called."""
    assert [service.full_name for service in services() if not has_server(service)] == []


_CLIENT = "sdk/seamflow/client/"
_CLOSED_ROLLOUTS = "services/lib/closed_rollouts.py"
_ENVIRONMENT_CLIENT = "sdk/seamflow/environment/environment_client.py"

FOLDERS: Mapping[Identity, str] = {
    Identity.OPERATOR: "sdk/seamflow/cli/",
    Identity.AGENT: _CLIENT,
    Identity.TRAJECTORY_MANAGER: "trajectory_manager/",
    Identity.ROLLOUT_GATEWAY: "rollout/gateway/",
    Identity.HTTP_GATEWAY: "rollout/http_gateway/",
    Identity.ROLLOUT_SERVER: "rollout/server/",
    Identity.SCHEDULER: "scheduler/",
    Identity.NODE_AGENT: "services/node_agent/",
    Identity.TRAINER: "trainer/",
    Identity.WEIGHTS: "services/weights/",
    Identity.DATALOADER: "services/dataloader/",
    Identity.RANKER: "services/ranker/",
    Identity.EVALUATOR: "services/evaluator/",
    Identity.SCORING: "services/scoring/",
    Identity.ENVIRONMENTS: "services/environments/",
    Identity.TOOL_LOOP: "services/tool_loop/",
    Identity.CONSOLE: "services/console/",
    Identity.LAUNCHER: "services/launcher/",
    Identity.CREATE_RUN: "deploy/create_run.py",
}
LIBRARIES: Mapping[Identity, tuple[str, ...]] = {
    Identity.OPERATOR: ("sdk/seamflow/inspect/",),
    Identity.HTTP_GATEWAY: (_CLIENT,),
    Identity.DATALOADER: (_CLOSED_ROLLOUTS, _ENVIRONMENT_CLIENT),
    Identity.RANKER: (_CLOSED_ROLLOUTS,),
    Identity.ENVIRONMENTS: (_CLIENT, _ENVIRONMENT_CLIENT),
    Identity.EVALUATOR: (_ENVIRONMENT_CLIENT, _RUN_CLIENTS),
    Identity.CONSOLE: (
        _RUN_CLIENTS,
        "sdk/seamflow/inspect/snapshot.py",
        "sdk/seamflow/inspect/progress.py",
        "sdk/seamflow/inspect/processes.py",
    ),
    Identity.LAUNCHER: (
        _RUN_CLIENTS,
        "sdk/seamflow/inspect/snapshot.py",
        "sdk/seamflow/inspect/progress.py",
        "sdk/seamflow/inspect/processes.py",
    ),
}
"""What makes calls for a process, beside its own folder."""

PASSED_ON = {(Identity.HTTP_GATEWAY, rpc) for rpc in ("LeaseRollouts", "StartRollout")}
"""Calls with the token of the agent that asked for them, not with the process's own."""
HOMONYMS = {(Identity.ROLLOUT_GATEWAY, "Heartbeat")}
"""Not the scheduler's rpc: a message of the rollout service."""


def called_in(*roots: str) -> set[tuple[str, str]]:
    """(service, rpc) of what modules below these folders call, with stubs made in any of them."""
    trees = [
        tree
        for file, tree in product().items()
        if file.relative_to(ROOT).as_posix().startswith(roots)
    ]
    return {
        (service.full_name, method.name)
        for service in services()
        for method in service.methods
        if is_called(method, trees)
    }


def granted_to(identity: Identity) -> set[tuple[str, str]]:
    """(service, rpc) of the table."""
    return {
        (service, rpc)
        for service, rpcs in PERMISSIONS.items()
        for rpc, callers in rpcs.items()
        if identity in callers
    }


@pytest.mark.parametrize("identity", Identity)
def test_each_identity_may_call_what_its_process_calls(identity: Identity) -> None:
    """A new call of a process needs its entry."""
    stubs = [each for each in LIBRARIES.get(identity, ()) if each == _RUN_CLIENTS]
    called = {
        (service, rpc)
        for service, rpc in called_in(FOLDERS[identity], *stubs)
        if PERMISSIONS[service][rpc] != ROLLOUT and (identity, rpc) not in PASSED_ON | HOMONYMS
    }
    assert called - granted_to(identity) == set()


@pytest.mark.parametrize("identity", sorted(set(Identity) - {Identity.OPERATOR}))
def test_no_process_may_do_more_than_it_calls(identity: Identity) -> None:
    """A grant without a call goes; operators read everything."""
    called = called_in(FOLDERS[identity], *LIBRARIES.get(identity, ()))
    assert granted_to(identity) - called - FOR_OLDER == set()


def test_a_servicer_alone_is_no_caller() -> None:
    """Negative control: defining a method, or naming it in a text, is not calling it."""
    servicer = ast.parse("class S:\n    async def Cut(self): return 'Cut'\n")
    caller = ast.parse("await stub.Cut(request)")
    assert (calls(servicer, "Cut"), calls(caller, "Cut")) == (False, True)
    assert not uses(ast.parse("from m import add_XServicer_to_server"), "add_XServicer_to_server")
