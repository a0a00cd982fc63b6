"""Nothing in the contract is unused: each rpc has a caller, each service a server."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from services.chassis.rpc.permissions import PERMISSIONS, Role

ROOT = Path(__file__).parents[1]
PRODUCT = (
    "sdk/seamflow",
    "services",
    "trainer",
    "rollout",
    "scheduler",
    "trajectory_manager",
)


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
    stub = f"{method.containing_service.name}Stub"
    path = f"/{method.containing_service.full_name}/{method.name}"
    return any(names_path(tree, path) for tree in product().values()) or any(
        any(uses(tree, stub) for tree in trees) and any(calls(tree, method.name) for tree in trees)
        for trees in processes().values()
    )


def has_server(service: ServiceDescriptor) -> bool:
    """A module of the product adds a servicer of it to a server."""
    return any(uses(tree, f"add_{service.name}Servicer_to_server") for tree in product().values())


def test_every_rpc_has_a_caller() -> None:
    """What nobody calls is deleted, or given a caller."""
    methods = [method for service in services() for method in service.methods]
    assert len(methods) > 40
    uncalled = {method.full_name for method in methods if not has_caller(method)}
    assert uncalled == set(), "give a new rpc a caller, or a command of the CLI"


def test_every_service_has_a_server() -> None:
    """What nobody serves cannot be called."""
    assert [service.full_name for service in services() if not has_server(service)] == []


def called_in(*roots: str) -> set[tuple[str, str]]:
    """(service, rpc) of every call in modules below these folders that make or hold its stub."""
    trees = [
        tree
        for file, tree in product().items()
        if file.relative_to(ROOT).as_posix().startswith(roots)
    ]
    return {
        (service.full_name, method.name)
        for service in services()
        for tree in trees
        if uses(tree, f"{service.name}Stub")
        for method in service.methods
        if calls(tree, method.name)
    }


def test_callers_may_call_what_they_call() -> None:
    """The commands of the CLI are open to operators, the calls of processes to services."""
    for role, roots in ((Role.OPERATOR, ("sdk/seamflow/cli/",)), (Role.SERVICE, PRODUCT[1:])):
        called = called_in(*roots)
        assert len(called) > 15
        assert [name for name in sorted(called) if role not in PERMISSIONS[name[0]][name[1]]] == []


def test_a_servicer_alone_is_no_caller() -> None:
    """Negative control: defining a method, or naming it in a text, is not calling it."""
    servicer = ast.parse("class S:\n    async def Cut(self): return 'Cut'\n")
    caller = ast.parse("await stub.Cut(request)")
    assert (calls(servicer, "Cut"), calls(caller, "Cut")) == (False, True)
    assert not uses(ast.parse("from m import add_XServicer_to_server"), "add_XServicer_to_server")
