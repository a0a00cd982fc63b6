"""The import rule: SDK <- chassis <- processes, and processes never know each other."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROCESSES = {
    "trajectory_manager",
    "rollout.gateway",
    "rollout.server",
    "scheduler",
    "trainer",
    "services.weights",
    "services.node_agent",
    "services.dataloader",
    "services.ranker",
    "services.scoring",
    "services.launcher",
}
OURS = ("trajectory_manager", "rollout", "scheduler", "trainer", "services", "examples", "bench")


def imports(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every absolute import below a folder, wherever in a file it stands."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from ((file, f"{node.module}.{alias.name}") for alias in node.names)


def is_within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or something in it."""
    return name == package or name.startswith(f"{package}.")


def may_import(owner: str, name: str) -> bool:
    """Whether a process may import one of our modules."""
    return is_within(name, owner) or is_within(name, "services.chassis")


def is_ours(name: str) -> bool:
    """Whether a dotted name is code of this repository outside the SDK."""
    return any(is_within(name, package) for package in OURS)


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_a_process_imports_only_the_sdk_the_chassis_and_itself(process: str) -> None:
    """Processes meet over gRPC, never over an import."""
    folder = ROOT.joinpath(*process.split("."))
    assert folder.is_dir()
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, name in imports(folder)
        if is_ours(name) and not may_import(process, name)
    ]
    assert wrong == []


def test_the_chassis_imports_only_the_sdk_and_itself() -> None:
    """What all share must not know who shares it."""
    names = [name for _, name in imports(ROOT / "services" / "chassis") if is_ours(name)]
    assert [name for name in names if not is_within(name, "services.chassis")] == []


def test_the_sdk_imports_grpc_protobuf_and_itself() -> None:
    """An agent installs grpcio and protobuf, nothing more."""
    allowed = {"seamflow", "grpc", "google", *sys.stdlib_module_names}
    names = {(file, name) for file, name in imports(ROOT / "sdk" / "seamflow")}
    assert [f"{file}: {name}" for file, name in names if name.split(".")[0] not in allowed] == []


def test_the_rule_catches_a_process_that_imports_another() -> None:
    """Negative control: a planted import is not allowed."""
    assert is_ours("scheduler.policy")
    assert not may_import("trainer", "scheduler.policy")
    assert not may_import("rollout.gateway", "rollout.server.engine")


def test_no_installed_package_takes_our_names() -> None:
    """A dependency called `trainer` or `scheduler` would shadow ours, or be shadowed."""
    taken = importlib.metadata.packages_distributions()
    assert {name: taken[name] for name in OURS if name in taken} == {}


@pytest.mark.parametrize("folder", ["sdk/seamflow", *OURS[:-1]])
def test_nothing_unpickles_or_evaluates(folder: str) -> None:
    """No pickle on any wire or disk path, no evaluated text."""
    for file, name in imports(ROOT / folder):
        assert name.split(".")[0] not in {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, (
            file
        )
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "torch.load", "torch.save"}, (
                    f"{file}: {called}"
                )
