"""Every rpc of every process: broken bytes are the caller's mistake, never ours."""

from __future__ import annotations

import asyncio
import importlib
import random
import string
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from seamflow.trajectory.v1 import run_service_pb2, trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from tests.lib.end_to_end.support import Process, make_tokenizer_folder
from tests.lib.trainer.support import make_model

RUN = f"mutated-{uuid.uuid4().hex}"
"""Of its own: the Redis is that of other tests too."""
COUNTS = [
    100,
    pytest.param(
        1000, marks=pytest.mark.long(short="tests/system/end_to_end/test_mutated_requests.py")
    ),
]
"""Requests to an rpc."""
CONCURRENCY = 100
"""Of which many wait for something until their time is up."""
TIMEOUT = 1.0
OURS_TO_MEND = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED}
UNSIGNED = {
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
}
SERVICES = {
    "trajectory_manager": [
        "trajectory.v1.trajectory_service.TrajectoryService",
        "trajectory.v1.sample_service.SampleService",
        "trajectory.v1.task_service.TaskService",
        "trajectory.v1.column_service.ColumnService",
    ],
    "rollout_gateway": ["rollout.v1.rollout_service.RolloutService"],
    "rollout_server": ["rollout.v1.rollout_server_service.RolloutServerService"],
    "weights": ["weights.v1.weight_service.WeightService"],
    "scheduler": ["scheduler.v1.scheduler_service.SchedulerService"],
    "trainer": ["trainer.v1.trainer_service.TrainerService"],
    "ranker": ["ranker.v1.ranker_service.RankerService"],
    "evaluator": ["evaluator.v1.evaluator_service.EvaluatorService"],
}


def methods(process: str) -> Iterator[MethodDescriptor]:
    """All rpcs a process serves."""
    for name in SERVICES[process]:
        module, _, service = name.rpartition(".")
        file = importlib.import_module(f"seamflow.{module}_pb2").DESCRIPTOR
        yield from file.services_by_name[service].methods


RPCS = [(process, method.name) for process in SERVICES for method in methods(process)]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[dict[str, str]]:
    """One real process of each kind, on a real Redis and a fake engine."""
    folder = tmp_path_factory.mktemp("mutated")
    with ExitStack() as stack:
        processes = {
            "trajectory_manager": Process(
                "trajectory_manager", "trajectory_manager", folder, redis_url=redis_url
            ),
            "weights": Process(
                *("services.weights", "weights", folder),
                folder=folder / "weights",
                redis_url=redis_url,
            ),
            "scheduler": Process("scheduler", "scheduler", folder, redis_url=redis_url),
            "rollout_server": Process("rollout.server", "rollout_server", folder, engine="fake"),
        }
        processes["rollout_gateway"] = Process(
            "rollout.gateway",
            "rollout_gateway",
            folder,
            run_id=RUN,
            model=make_tokenizer_folder(folder / "model"),
            trajectory_manager=processes["trajectory_manager"].address,
            servers=processes["rollout_server"].address,
        )
        for process in processes.values():
            stack.enter_context(process)
        create_run(processes["trajectory_manager"].address)
        processes["trainer"] = Process(
            "trainer",
            "trainer",
            folder,
            run_id=RUN,
            model=make_model(folder / "trained"),
            checkpoint__folder=folder / "checkpoints",
            trajectory_manager=processes["trajectory_manager"].address,
            weights=processes["weights"].address,
        )
        stack.enter_context(processes["trainer"])
        processes["ranker"] = Process(
            *("services.ranker", "ranker", folder),
            run_id=RUN,
            trajectory_manager=processes["trajectory_manager"].address,
        )
        stack.enter_context(processes["ranker"])
        (folder / "heldout.jsonl").write_text('{"payload": {}}\n')
        processes["evaluator"] = Process(
            *("services.evaluator", "evaluator", folder),
            run_id=RUN,
            tasks=folder / "heldout.jsonl",
            folder=folder / "evaluation",
            trajectory_manager=processes["trajectory_manager"].address,
            weights=processes["weights"].address,
            scheduler=processes["scheduler"].address,
            trainer=processes["trainer"].address,
        )
        stack.enter_context(processes["evaluator"])
        yield {name: process.address for name, process in processes.items()}


def create_run(manager: str) -> None:
    """The trainer needs a run to train."""
    config = trajectory_pb2.RunConfig(
        group_size=2,
        groups_per_step=2,
        max_staleness=1,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
        lease_duration=Duration(seconds=60),
        durability=trajectory_pb2.DURABILITY_FAST,
    )
    with grpc.insecure_channel(manager) as channel:
        request = run_service_pb2.CreateRunRequest(run_id=RUN, config=config)
        RunServiceStub(channel).CreateRun(request)


def random_text(rng: random.Random) -> str:
    """A short string, sometimes with signs that parsers trip over."""
    return "".join(
        rng.choice(string.ascii_letters + "/@:{}\0\n 0") for _ in range(rng.randrange(9))
    )


def random_value(field: FieldDescriptor, rng: random.Random) -> object:
    """A value of the field's scalar type, extremes included."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = random_text(rng)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice([0.0, -1.0, 0.5, float("nan"), float("inf"), 1e30])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([0, 1, 2, 99])
    return rng.choice([0, 1, 7, -1, -(2**31), 2**31 - 1])


def random_message(descriptor: Descriptor, rng: random.Random, depth: int = 0) -> Message:
    """A message whose fields hold anything their types allow."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if rng.random() < 0.3 or depth > 3:
            continue
        target = getattr(message, field.name)
        if field.message_type is None:
            if field.is_repeated:
                target.extend(random_value(field, rng) for _ in range(rng.randrange(4)))
            else:
                _set(message, field, random_value(field, rng))
        elif not field.message_type.GetOptions().map_entry:
            child = target.add() if field.is_repeated else target
            child.CopyFrom(random_message(field.message_type, rng, depth + 1))
    return message


def _set(message: Message, field: FieldDescriptor, value: object) -> None:
    if field.type in UNSIGNED:
        value = abs(int(str(value)))
    setattr(message, field.name, value)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The same bytes with some flipped, cut off, doubled or put in."""
    data = bytearray(content or b"\x0a\x01a")
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place:
            del data[place:]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randrange(1, 5))
        else:
            data.extend(data[place:])
    return bytes(data)


def requests(descriptor: Descriptor, rng: random.Random, count: int) -> Iterator[bytes]:
    """Half of them well-formed nonsense, half of them broken bytes."""
    for number in range(count):
        content = random_message(descriptor, rng).SerializeToString()
        yield content if number % 2 else mutated(content, rng)


async def outcome(call: object, request: bytes, streams: bool) -> tuple[grpc.StatusCode, str]:
    """Status and message of one call."""
    try:
        if streams:
            async for _ in call(request, timeout=TIMEOUT):  # type: ignore[operator]
                break
        else:
            await call(request, timeout=TIMEOUT)  # type: ignore[operator]
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("process", "rpc"), RPCS, ids=[f"{p}-{r}" for p, r in RPCS])
async def test_no_request_makes_a_process_fail(
    process: str, rpc: str, count: int, addresses: dict[str, str]
) -> None:
    """Of many requests none ends UNKNOWN or INTERNAL, none tells of our exceptions."""
    method = next(m for m in methods(process) if m.name == rpc)
    rng = random.Random(f"{process}.{rpc}")
    path = f"/{method.containing_service.full_name}/{rpc}"
    slots = asyncio.Semaphore(CONCURRENCY)
    seen: Counter[grpc.StatusCode] = Counter()
    async with grpc.aio.insecure_channel(addresses[process]) as channel:
        streams = method.server_streaming
        call: (
            grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            | grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        ) = (channel.unary_stream if streams else channel.unary_unary)(path)

        async def one(request: bytes) -> None:
            async with slots:
                code, message = await outcome(call, request, streams)
            seen[code] += 1
            assert code not in OURS_TO_MEND, (code, message, request)
            assert "Traceback" not in message and "Error(" not in message, message

        async with asyncio.TaskGroup() as group:
            for request in requests(method.input_type, rng, count):
                group.create_task(one(request))
    assert seen.total() == count
    # Requests without fields have nothing that could be wrong, save the bytes themselves.
    assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 0
