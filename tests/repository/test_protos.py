"""The contract's rules beyond those of buf, checked from descriptors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor
from seamflow.common.v1 import error_pb2

from services.chassis.errors import Reason

ROOT = Path(__file__).parents[2]
PROTOS = sorted(path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto"))
SERVICES = {
    "seamflow.rollout.v1.RolloutService",
    "seamflow.rollout.v1.RolloutServerService",
    "seamflow.trajectory.v1.TrajectoryService",
    "seamflow.trajectory.v1.SampleService",
    "seamflow.trajectory.v1.ColumnService",
    "seamflow.trajectory.v1.TaskService",
    "seamflow.trajectory.v1.RunService",
    "seamflow.weights.v1.WeightService",
    "seamflow.scheduler.v1.SchedulerService",
    "seamflow.trainer.v1.TrainerService",
    "seamflow.worker.v1.WorkerService",
    "seamflow.ranker.v1.RankerService",
    "seamflow.common.v1.ProcessService",
    "seamflow.evaluator.v1.EvaluatorService",
    "seamflow.launcher.v1.LauncherService",
    "seamflow.environment.v1.EnvironmentService",
    "seamflow.environment.v1.RewardService",
}
CLIENT_STREAMS = {"seamflow.weights.v1.WeightService.UploadShards"}
"""Every message of which is complete in itself and idempotent."""


def descriptor(proto: Path) -> FileDescriptor:
    """The generated module's descriptor."""
    name = ".".join(proto.with_suffix("").parts) + "_pb2"
    file: FileDescriptor = importlib.import_module(name).DESCRIPTOR
    return file


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    """All messages of a file, nested ones too, map entries left out."""
    stack = list(file.message_types_by_name.values())
    while stack:
        message = stack.pop()
        if not message.GetOptions().map_entry:
            yield message
            stack.extend(message.nested_types)


@pytest.mark.parametrize("proto", PROTOS, ids=str)
def test_package_is_the_path(proto: Path) -> None:
    """seamflow/<noun>/v1/x.proto holds package seamflow.<noun>.v1."""
    assert descriptor(proto).package == ".".join(proto.parent.parts)
    assert re.fullmatch(r"seamflow\.[a-z]+\.v\d+", descriptor(proto).package)


@pytest.mark.parametrize("proto", PROTOS, ids=str)
def test_enums_have_an_unspecified_zero_and_a_prefix(proto: Path) -> None:
    """A reader that knows an enum not at all still knows what 0 means."""
    for enum in descriptor(proto).enum_types_by_name.values():
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


@pytest.mark.parametrize("proto", PROTOS, ids=str)
def test_each_rpc_has_its_own_request_and_response(proto: Path) -> None:
    """X takes XRequest and gives XResponse, so that each may grow alone; few client streams."""
    for service in descriptor(proto).services_by_name.values():
        assert service.name.endswith("Service")
        for method in service.methods:
            assert method.input_type.name == f"{method.name}Request"
            assert method.output_type.name == f"{method.name}Response"
            streams = method.client_streaming and method.full_name not in CLIENT_STREAMS
            assert not streams, "state must not live in a connection"


@pytest.mark.parametrize("proto", PROTOS, ids=str)
def test_fields_are_lower_snake_case(proto: Path) -> None:
    """One spelling in proto, Python, Redis and metrics."""
    for message in messages(descriptor(proto)):
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", field.name) for field in message.fields)


def test_the_contract_holds_every_service() -> None:
    """A service that is added or removed is added or removed here too."""
    found = {s.full_name for p in PROTOS for s in descriptor(p).services_by_name.values()}
    assert found == SERVICES


STATELESS = {"common", "environment"}
"""An environment serves any run: what it keeps belongs to an episode."""


def test_requests_of_stateful_services_name_their_run() -> None:
    """Runs share services and stores, never state."""
    # A launcher has one run, which its secret opens: who joins learns the name from the answer.
    per_node = {"scheduler", "trainer", "worker", "rollout_server_service", "launcher"}
    for proto in PROTOS:
        if proto.parts[1] in STATELESS or per_node & {proto.parts[1], proto.stem}:
            continue
        for service in descriptor(proto).services_by_name.values():
            for method in service.methods:
                is_list_of_runs = method.name == "ListRuns"
                assert is_list_of_runs or names_its_run(method.input_type), method.full_name


def names_its_run(request: Descriptor) -> bool:
    """Whether it holds a run_id, or is a batch of messages that each do."""
    if "run_id" in request.fields_by_name:
        return True
    return bool(request.fields) and all(
        field.message_type is not None and "run_id" in field.message_type.fields_by_name
        for field in request.fields
    )


def test_the_reasons_of_the_contract_are_those_of_the_services() -> None:
    """What a client branches on is in the contract, and every value of it can be given."""
    names = [name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys()]  # noqa: SIM118
    assert names == ["UNSPECIFIED", *Reason]
    assert [reason.name for reason in Reason] == [reason.value for reason in Reason]
