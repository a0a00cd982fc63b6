"""A small task queue that keeps the contract of TaskService, and what the tests do with it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from seamflow.environment import serving as environment_serving
from seamflow.trajectory.v1 import task_service_pb2 as pb
from seamflow.trajectory.v1.task_service_pb2_grpc import (
    TaskServiceServicer,
    add_TaskServiceServicer_to_server,
)
from seamflow.trajectory.v1.trajectory_pb2 import Task

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import Reason, already_exists, exhausted, not_found, unavailable
from services.chassis.rpc.server import Service, started
from services.dataloader.config import DataloaderConfig
from services.dataloader.curriculum import Curriculum, GroupSizes
from services.dataloader.loader import Loader
from services.dataloader.task_queue import TaskQueue
from services.lib.tasks.sources import open_source


class Queue(TaskServiceServicer):
    """All or none of a batch, bounded, idempotent by task_id."""

    def __init__(self, capacity: int = 10_000, run_id: str = "run") -> None:
        self.capacity = capacity
        self.run_id = run_id
        self.tasks: dict[str, Task] = {}
        self.taken = 0
        self.most_waiting = 0
        self.num_refused = 0
        self.unavailable_calls = 0

    async def SubmitTasks(
        self, request: pb.SubmitTasksRequest, context: Any
    ) -> pb.SubmitTasksResponse:
        """Accept the tasks, or reject them according to the contract."""
        if self.unavailable_calls:
            self.unavailable_calls -= 1
            raise unavailable(Reason.STORE_UNAVAILABLE, "the store does not answer")
        if request.run_id != self.run_id:
            raise not_found("run", request.run_id)
        new = [task for task in request.tasks if self._is_new(task)]
        if len(self.tasks) - self.taken + len(new) > self.capacity:
            self.num_refused += 1
            raise exhausted(Reason.TOO_MANY_REQUESTS, "the queue is full", 0.01)
        self.tasks |= {task.task_id: task for task in new}
        waiting = len(self.tasks) - self.taken
        self.most_waiting = max(self.most_waiting, waiting)
        return pb.SubmitTasksResponse(num_accepted=len(new), num_free=self.capacity - waiting)

    def _is_new(self, task: Task) -> bool:
        known = self.tasks.get(task.task_id)
        if known is not None and known != task:
            raise already_exists("task", task.task_id)
        return known is None

    @property
    def ids(self) -> list[str]:
        """Ids in the order they arrived."""
        return list(self.tasks)

    async def until(self, count: int) -> None:
        """Wait until `count` tasks have arrived."""
        async with asyncio.timeout(10):
            while len(self.tasks) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(queue: Queue) -> AsyncIterator[str]:
    """Serve the queue; gives its address."""
    service = Service(servicers=[(add_TaskServiceServicer_to_server, queue)])
    async with started(service, ServerConfig(drain_seconds=0.1)) as port:
        yield f"127.0.0.1:{port}"


@contextmanager
def environment_server(environment: type) -> Iterator[str]:
    """Serve an environment class in a thread; gives its address."""
    loop, ports = asyncio.new_event_loop(), Future[int]()
    stop = asyncio.Event()

    async def run() -> None:
        async with environment_serving(environment) as port:
            ports.set_result(port)
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        yield f"127.0.0.1:{ports.result(10)}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def write_jsonl(path: Path, rows: Iterable[Any]) -> str:
    """Write rows as JSON Lines; returns the path as configuration has it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count: int) -> list[dict[str, Any]]:
    """Tasks t0, t1, ..."""
    return [
        {"task_id": f"t{number}", "payload": {"question": f"{number} + 1"}}
        for number in range(count)
    ]


async def load(
    address: str,
    sizes: GroupSizes | None = None,
    curriculum: Curriculum | None = None,
    **settings: Any,
) -> None:
    """Run a loader with these settings to its end."""
    config = DataloaderConfig(
        **{"run_id": "run", "trajectory_manager": address, "epochs": 1, **settings}
    )
    source = open_source(config.tasks, shuffle=config.shuffle, seed=config.seed)
    async with grpc.aio.insecure_channel(config.trajectory_manager) as channel:
        queue = TaskQueue(channel, run_id=config.run_id, clock=time.monotonic)
        await Loader(config, source, queue, sizes, curriculum).run()


def sums(seed: int, epoch: int) -> Iterator[dict[str, Any]]:
    """Five tasks made on the spot."""
    for number in range(5):
        yield {"task_id": f"sum-{number}", "payload": {"a": seed, "b": epoch}}


def texts(seed: int, epoch: int) -> Iterator[str]:
    """A function that yields what is no task."""
    yield "not a dict"


def breaks(seed: int, epoch: int) -> Iterator[dict[str, Any]]:
    """A function with a mistake."""
    yield from ()
    raise KeyError("x")


def endless(seed: int, epoch: int) -> Iterator[dict[str, Any]]:
    """Tasks of a function."""
    number = 0
    while True:
        yield {"task_id": f"t{number}", "payload": {"seed": seed, "epoch": epoch}}
        number += 1
