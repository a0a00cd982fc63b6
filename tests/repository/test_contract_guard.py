"""The contract is kept: buf lints it, and refuses whatever would break a client of the release."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "protos" / "released.binpb"
BUF = Path(sys.executable).with_name("buf")

Edit = Callable[[Path], None]
"""Changes a copy of protos/."""

SCHEDULER = "seamflow/scheduler/v1/scheduler_service.proto"
TRAINER = "seamflow/trainer/v1/trainer_service.proto"
WORKER = "seamflow/worker/v1/worker_service.proto"
RANKER = "seamflow/ranker/v1/ranker_service.proto"


def buf(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run buf on the contract in `folder`."""
    return subprocess.run(
        [str(BUF), *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def replaced(file: str, old: str, new: str) -> Edit:
    """Replace the only occurrence of a pattern."""

    def edit(protos: Path) -> None:
        path = protos / file
        text, number = re.subn(old, new, path.read_text(encoding="utf-8"))
        assert number == 1, f"{old!r} occurs {number} times in {file}: choose another target"
        path.write_text(text, encoding="utf-8")

    return edit


def both(*edits: Edit) -> Edit:
    """One after the other."""

    def edit(protos: Path) -> None:
        for each in edits:
            each(protos)

    return edit


def moved(target: str, head: str) -> Edit:
    """Move WorkerService to another file, which is created below `head` if it does not exist."""

    def edit(protos: Path) -> None:
        source, path = protos / WORKER, protos / target
        text = source.read_text(encoding="utf-8")
        service = re.search(r"service WorkerService \{.*?\n\}\n", text, re.DOTALL)
        assert service is not None
        source.write_text(text.replace(service[0], ""), encoding="utf-8")
        known = path.read_text(encoding="utf-8") if path.exists() else 'syntax = "proto3";\n'
        body = re.sub(r"(?<=[( ])(\w+(?:Request|Response))\b", rf"{head}.\1", service[0])
        declared = known if path.exists() else f"{known}package {head};\n"
        declared = declared.replace(";\n", f';\nimport "{WORKER}";\n', 1)
        path.write_text(f"{declared}\n{body}", encoding="utf-8")

    return edit


def deleted(protos: Path) -> None:
    """Delete a file."""
    (protos / RANKER).unlink()


UNRELEASED = {
    "seamflow.common.v1.ProcessService",
    "seamflow.environment.v1",
    "seamflow.environment.v1.EnvironmentService",
    "seamflow.environment.v1.RewardService",
    "seamflow.evaluator.v1",
    "seamflow.evaluator.v1.EvaluatorService",
    "seamflow.launcher.v1",
    "seamflow.launcher.v1.LauncherService",
}
"""New since the release; empty after `make descriptors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A change that breaks some client."""

    edit: Edit
    rules: frozenset[str]
    """One of these rules of buf has to refuse it; a copy that does not compile is no evidence."""
    before: Edit | None = None
    """Makes what is mutated, where the contract has none."""


def mutation(edit: Edit, *rules: str, before: Edit | None = None) -> Mutation:
    """A mutation that one of `rules` refuses."""
    return Mutation(edit=edit, rules=frozenset(rules), before=before)


ADDRESS = r"  string address = 2;\n"
LOST = "NODE_STATE_LOST = 5;"
REGISTER = r"RegisterNode\(RegisterNodeRequest\) returns \(RegisterNodeResponse\)"
STREAMED = replaced(SCHEDULER, r"Heartbeat\(Heart", "Heartbeat(stream Heart")
MUTATIONS = {
    "rpc deleted": mutation(replaced(SCHEDULER, r"  rpc PlanSplit\(.*\n", ""), "RPC_NO_DELETE"),
    "stream dropped on response": mutation(
        replaced(SCHEDULER, r"\(stream WatchA", "(WatchA"), "RPC_SAME_SERVER_STREAMING"
    ),
    "stream dropped on request": mutation(
        replaced(SCHEDULER, r"Heartbeat\(stream Heart", "Heartbeat(Heart"),
        "RPC_SAME_CLIENT_STREAMING",
        before=STREAMED,
    ),
    "stream added on request": mutation(STREAMED, "RPC_SAME_CLIENT_STREAMING"),
    "request type swapped": mutation(
        replaced(
            SCHEDULER, REGISTER, "RegisterNode(DrainNodeRequest) returns (RegisterNodeResponse)"
        ),
        "RPC_SAME_REQUEST_TYPE",
    ),
    "response type swapped": mutation(
        replaced(
            SCHEDULER, REGISTER, "RegisterNode(RegisterNodeRequest) returns (DrainNodeResponse)"
        ),
        "RPC_SAME_RESPONSE_TYPE",
    ),
    "field deleted": mutation(replaced(SCHEDULER, ADDRESS, ""), "FIELD_NO_DELETE"),
    "field renumbered": mutation(
        replaced(SCHEDULER, ADDRESS, "  string address = 9;\n"), "FIELD_NO_DELETE"
    ),
    "field renamed": mutation(
        replaced(SCHEDULER, ADDRESS, "  string target = 2;\n"), "FIELD_SAME_NAME"
    ),
    "scalar type changed": mutation(
        replaced(TRAINER, "int64 step = 3;", "string step = 3;"), "FIELD_SAME_TYPE"
    ),
    "message type of a field swapped": mutation(
        replaced(SCHEDULER, "  Hardware hardware = 6;", "  Worker hardware = 6;"),
        "FIELD_SAME_TYPE",
    ),
    "repeated made singular": mutation(
        replaced(SCHEDULER, "repeated Worker workers = 3;", "Worker workers = 3;"),
        "FIELD_SAME_CARDINALITY",
    ),
    "field moved into a oneof": mutation(
        replaced(SCHEDULER, ADDRESS, "  oneof place {\n  string address = 2;\n  }\n"),
        "FIELD_SAME_ONEOF",
    ),
    "message deleted": mutation(
        both(
            replaced(SCHEDULER, r"message UnplacedGang \{[^}]*\}\n", ""),
            replaced(SCHEDULER, "repeated UnplacedGang", "repeated Run"),
        ),
        "MESSAGE_NO_DELETE",
    ),
    "enum deleted": mutation(
        both(
            replaced(WORKER, r"enum WorkerState \{[^}]*\}\n", ""),
            replaced(WORKER, "WorkerState state", "int32 state"),
        ),
        "ENUM_NO_DELETE",
    ),
    "enum value deleted": mutation(replaced(SCHEDULER, LOST, ""), "ENUM_VALUE_NO_DELETE"),
    "enum value renumbered": mutation(
        replaced(SCHEDULER, LOST, "NODE_STATE_LOST = 6;"), "ENUM_VALUE_NO_DELETE"
    ),
    "enum value renamed": mutation(
        replaced(SCHEDULER, LOST, "NODE_STATE_GONE = 5;"), "ENUM_VALUE_SAME_NAME"
    ),
    "service deleted": mutation(
        replaced(RANKER, r"service RankerService \{(.|\n)*?\n\}\n", ""), "SERVICE_NO_DELETE"
    ),
    "service moved to another file": mutation(
        moved("seamflow/worker/v1/moved_service.proto", "seamflow.worker.v1"), "SERVICE_NO_DELETE"
    ),
    "service moved to another package": mutation(
        moved(RANKER, "seamflow.worker.v1"), "SERVICE_NO_DELETE"
    ),
    "package renamed": mutation(
        replaced(RANKER, r"package seamflow\.ranker\.v1;", "package seamflow.order.v1;"),
        "FILE_SAME_PACKAGE",
    ),
    "file deleted": mutation(deleted, "FILE_NO_DELETE"),
    "go_package changed": mutation(
        replaced(RANKER, "seamflow/ranker/v1;rankerv1", "ranker/v1;rankerv1"),
        "FILE_SAME_GO_PACKAGE",
    ),
}
ADDED_RPC = "  // New.\n  rpc Extra(ExtraRequest) returns (ExtraResponse);\n"
HARMLESS: dict[str, Edit] = {
    "field added": replaced(SCHEDULER, ADDRESS, "  string address = 2;\n  string zone = 4;\n"),
    "comment changed": replaced(RANKER, "// The start of a turn.", "// What a turn starts from."),
    "enum value added": replaced(SCHEDULER, LOST, f"{LOST}\n  NODE_STATE_PARKED = 6;"),
    "rpc added": replaced(
        RANKER,
        r"\n\}\n\n// The start",
        f"\n{ADDED_RPC}}}\nmessage ExtraRequest {{}}\nmessage ExtraResponse {{}}\n// The start",
    ),
}


def copied(folder: Path) -> Path:
    """A copy of the contract below `folder`; its protos/."""
    shutil.copy(ROOT / "buf.yaml", folder)
    shutil.copytree(ROOT / "protos", folder / "protos")
    return folder / "protos"


def broken_rules(folder: Path, edit: Edit, before: Edit | None = None) -> set[str]:
    """The rules of buf that a change of a copy of the contract breaks."""
    protos = copied(folder)
    if before is not None:
        before(protos)
    image = str(folder / "before.binpb")
    assert buf("build", "--as-file-descriptor-set", "-o", image, folder=folder).returncode == 0
    edit(protos)
    built = buf("build", folder=folder)
    assert built.returncode == 0, built.stderr
    found = buf("breaking", "--against", image, "--error-format", "json", folder=folder)
    assert (found.returncode == 0) == (not found.stdout), found.stderr
    return {json.loads(line)["type"] for line in found.stdout.splitlines()}


def test_the_contract_is_linted() -> None:
    """STANDARD and COMMENTS."""
    found = buf("lint")
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_nothing_released_is_broken() -> None:
    """What the last release promised still holds."""
    found = buf("breaking", "--against", str(RELEASED))
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_released_set_holds_the_whole_contract(tmp_path: Path) -> None:
    """No package and no service is unguarded."""
    image = tmp_path / "now.binpb"
    assert buf("build", "--as-file-descriptor-set", "-o", str(image)).returncode == 0
    now, released = (
        {
            name
            for file in FileDescriptorSet.FromString(path.read_bytes()).file
            for name in (file.package, *(f"{file.package}.{s.name}" for s in file.service))
        }
        for path in (image, RELEASED)
    )
    assert now - released == UNRELEASED, "run `make descriptors` at the release"


@pytest.mark.long(short="tests/repository/test_contract_guard.py")
def test_every_kind_of_break_is_refused(tmp_path: Path) -> None:
    """Each mutation is refused by its rule."""
    refused = []
    for number, (name, each) in enumerate(MUTATIONS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        rules = broken_rules(folder, each.edit, each.before)
        if rules & each.rules:
            refused.append(name)
    figures = {"mutations_tried": len(MUTATIONS), "mutations_refused": len(refused)}
    print(json.dumps(figures))
    assert set(MUTATIONS) - set(refused) == set()
    assert len(refused) >= 14


@pytest.mark.parametrize("name", HARMLESS)
def test_what_breaks_nobody_is_accepted(tmp_path: Path, name: str) -> None:
    """Negative control."""
    assert broken_rules(tmp_path, HARMLESS[name]) == set()
