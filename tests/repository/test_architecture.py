"""The structure of the tree: who may import whom, and how folders and files are laid out."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULES = 15
"""Modules in a folder, `__init__.py` and `__main__.py` aside."""

PROCESSES = (
    "trajectory_manager",
    "rollout.gateway",
    "rollout.http_gateway",
    "rollout.server",
    "scheduler",
    "trainer",
    "services.weights",
    "services.node_agent",
    "services.dataloader",
    "services.ranker",
    "services.evaluator",
    "services.scoring",
    "services.environments",
    "services.tool_loop",
    "services.console",
    "services.launcher",
)
OURS = (
    "trajectory_manager",
    "rollout",
    "scheduler",
    "trainer",
    "services",
    "tools",
    "adapters",
    "examples",
)
MEASURING = ("bench",)
PACKAGES = ("seamflow", "services.chassis", "services.lib", "tools", *PROCESSES)


def files_of(package: str) -> list[Path]:
    """The modules of a package, without generated code and files that are written for users."""
    folder = ROOT.joinpath(*package.split("."))
    folder = folder if folder.is_dir() else ROOT / "sdk" / package
    modules = [file for file in sorted(folder.rglob("*.py")) if "_pb2" not in file.name]
    return [file for file in modules if "template" not in file.parts]


def module_of(file: Path) -> str:
    """The dotted name of a file."""
    relative = file.relative_to(ROOT).with_suffix("")
    parts = relative.parts[1:] if relative.parts[0] == "sdk" else relative.parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Every absolute import of a file, wherever in it, as dotted names."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def is_within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or something in it."""
    return name == package or name.startswith(f"{package}.")


def is_ours(name: str, packages: Iterable[str] = (*OURS, *MEASURING, "tests")) -> bool:
    """Whether a dotted name is code of this repository outside the SDK."""
    return any(is_within(name, package) for package in packages)


def breaches(package: str, *allowed: str) -> list[str]:
    """Imports of a package that are neither its own, nor allowed, nor foreign."""
    return [
        f"{module_of(file)}: {name}"
        for file in files_of(package)
        for name in imports(file)
        if is_ours(name) and not any(is_within(name, each) for each in (package, *allowed))
    ]


def test_an_adapter_imports_the_sdk_and_its_framework() -> None:
    """It runs where nothing else of this repository is installed."""
    assert files_of("adapters")
    assert breaches("adapters") == []


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_the_sdk_the_chassis_the_libraries_and_itself(process: str) -> None:
    """Processes meet over gRPC, never over an import."""
    assert files_of(process)
    assert breaches(process, "services.chassis", "services.lib") == []


def test_what_is_shared_does_not_know_who_shares_it() -> None:
    """SDK <- chassis <- libraries <- processes <- tools."""
    assert breaches("services.chassis") == []
    assert breaches("services.lib", "services.chassis") == []
    assert breaches("tools", *OURS, "deploy") == []


def library_users(
    libraries: Mapping[str, Iterable[str]], imported: Mapping[str, Iterable[str]]
) -> dict[str, set[str]]:
    """The processes that use each library, themselves or through another library.

    Args:
        libraries: each with the libraries that it imports.
        imported: the names that each process imports.
    """
    users: dict[str, set[str]] = {library: set() for library in libraries}
    for process, names in imported.items():
        found = [library for name in names if (library := _module_in(users, name))]
        while found:
            library = found.pop()
            if process not in users[library]:
                users[library].add(process)
                found += libraries[library]
    return users


def test_a_library_has_two_processes_that_use_it() -> None:
    """What one process alone uses lies with that process."""
    packages = {module_of(f) for f in files_of("services.lib") if f.stem == "__init__"}
    imported = {each: [n for f in files_of(each) for n in imports(f)] for each in PROCESSES}
    users = library_users(import_graph("services.lib"), imported)
    assert {name: each for name, each in users.items() if len(each) < 2} == {
        name: set() for name in packages if not users[name]
    }


def test_a_library_of_one_process_is_noticed() -> None:
    """Negative control; one that another library imports has that one's users."""
    libraries = {"lib.own": ["lib.below"], "lib.shared": ["lib.below"], "lib.below": []}
    imported = {"a": ["lib.own.Name", "lib.shared"], "b": ["lib.shared.Name", "os.path"]}
    users = library_users(libraries, imported)
    assert users == {"lib.own": {"a"}, "lib.shared": {"a", "b"}, "lib.below": {"a", "b"}}


def test_measurements_do_not_import_tests() -> None:
    """`bench` runs from the product and what is its own; tests import it."""
    assert breaches("bench", *OURS) == []


def test_the_sdk_imports_grpc_protobuf_and_itself() -> None:
    """An agent installs grpcio and protobuf, nothing more."""
    allowed = {"seamflow", "grpc", "google", *sys.stdlib_module_names}
    foreign = {(f, n) for f in files_of("seamflow") for n in imports(f)}
    assert [f"{f}: {n}" for f, n in foreign if n.split(".")[0] not in allowed] == []


def test_a_process_that_imports_another_is_noticed() -> None:
    """Negative control."""
    assert is_ours("scheduler.policy")
    assert not is_within("scheduler.policy", "trainer")
    assert is_within("services.chassis.rpc.server", "services.chassis")


def import_graph(package: str) -> dict[str, set[str]]:
    """Modules of a package, each with those of the same package that it imports."""
    modules = {module_of(file): file for file in files_of(package)}
    return {
        module: {found for name in imports(file) if (found := _module_in(modules, name))} - {module}
        for module, file in modules.items()
    }


def _module_in(modules: Collection[str], name: str) -> str | None:
    # `from package.module import Name` names a module plus something in it.
    return next((n for n in (name, name.rpartition(".")[0]) if n in modules), None)


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that import each other in a circle; empty: there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def room_graph(package: str, graph: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Files and folders at the top of a package, each with those that it imports from."""

    def room(module: str) -> str:
        return module.removeprefix(f"{package}.").split(".")[0]

    rooms: dict[str, set[str]] = {}
    for module, names in graph.items():
        if module != package:
            rooms.setdefault(room(module), set()).update(room(n) for n in names if n != package)
    return {name: imported - {name} for name, imported in rooms.items()}


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "tools"])
def test_files_and_folders_of_a_package_are_layers(package: str) -> None:
    """Each imports from those below it alone: no folder knows who uses it."""
    assert circle(room_graph(package, import_graph(package))) == []


@pytest.mark.parametrize("package", [*PACKAGES, *MEASURING])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Neither at import time nor later."""
    assert circle(import_graph(package)) == []


def test_a_circle_and_an_import_upward_are_noticed() -> None:
    """Negative controls: the second graph has a circle of folders, and none of modules."""
    assert circle({"p.low.a": {"p.high.b"}, "p.high.b": {"p.low.a"}})
    upward = {"p.low.a": {"p.high.b"}, "p.high.b": {"p.low.c"}, "p.low.c": set[str]()}
    assert circle(upward) == []
    assert circle(room_graph("p", upward))


def test_no_folder_holds_more_modules_than_a_reader_takes_in() -> None:
    """What outgrows a folder gets folders."""
    roots = [*OURS, *MEASURING, "tests", "deploy"]
    files = [file for root in roots for file in (ROOT / root).rglob("*.py")]
    files += files_of("seamflow")
    counted = Counter(file.parent for file in files if not file.name.startswith("__"))
    wide = {str(folder): n for folder, n in counted.items() if n > MAX_MODULES}
    assert wide == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_name_stands_for_two_things_in_a_package(package: str) -> None:
    """A name found once is found."""
    stems = Counter(file.stem for file in files_of(package) if not file.name.startswith("__"))
    assert [stem for stem, number in stems.items() if number > 1] == []


def test_no_installed_package_takes_our_names() -> None:
    """A dependency called `trainer` or `scheduler` would shadow ours, or be shadowed."""
    names = (*OURS, *MEASURING)
    taken = importlib.metadata.packages_distributions()
    assert {name: taken[name] for name in names if name in taken} == {}


def called(file: Path) -> Iterator[str]:
    """What a file calls, as written."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("package", ["seamflow", *OURS])
def test_nothing_unpickles_or_evaluates(package: str) -> None:
    """No pickle on any wire or disk path, no evaluated text."""
    modules = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    functions = {"eval", "exec", "torch.load", "torch.save"}
    for file in files_of(package):
        assert not {name.split(".")[0] for name in imports(file)} & modules, file
        assert not set(called(file)) & functions, file
