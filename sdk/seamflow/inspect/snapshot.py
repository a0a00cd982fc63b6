"""Snapshot of a run: the state that all services report at one moment."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from seamflow.errors import PreconditionError, SeamflowError, decode
from seamflow.evaluator.v1 import evaluator_service_pb2 as evaluator_pb
from seamflow.inspect.clients import RunClients
from seamflow.inspect.endpoints import Endpoints
from seamflow.inspect.lives import Life, lives
from seamflow.inspect.processes import Process, ProcessState, known_processes, look
from seamflow.inspect.progress import Progress, equal_groups_discarded, read_progress, with_counts
from seamflow.pages import pages
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import trajectory_pb2, trajectory_service_pb2
from seamflow.weights.v1 import weight_service_pb2 as weight_pb

T = TypeVar("T")

_ANSWER_SECONDS = 5.0
_NO_ANSWER = (grpc.aio.AioRpcError, SeamflowError)
_AUDIT_LOG_SECONDS = 1.0  # the change feed never ends; the stored events arrive immediately
_HEALTHY = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse{status: SERVING}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """One rollout server that a node offers."""

    node_id: str
    address: str
    """host:port."""
    info: server_pb.GetServerInfoResponse | None
    """Its state; None: it did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State that the services report; None where one did not answer, with the error in `problems`.

    Example: Snapshot(now=1e9, trainer=GetStatusResponse(state=TRAINER_STATE_WAITING, step=6))
    """

    now: float = 0.0
    """Unix time of the requests; 0: nobody asks how long ago anything was."""
    run_id: str | None = None
    agents: str = ""
    logs: str = ""
    started: float | None = None
    """Unix time at which the launcher last started the run; None: unknown."""
    lives: tuple[Life, ...] = ()
    """Of the launcher, oldest first; none without the run's folder."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """host:port of the services asked, by name in `endpoints.SERVICES`."""
    zones: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, SeamflowError] = field(default_factory=dict)
    processes: tuple[ProcessState, ...] = ()
    """The run's processes, as far as the folder or the addresses name them."""
    free_bytes: int | None = None
    """Of the disk of the run's folder; None: it is elsewhere."""
    readiness: sample_pb.Readiness | None = None
    oldest_rollout: trajectory_pb2.Trajectory | None = None
    """The longest running rollout, without its tokens; only with `history`."""
    failed_rollouts: tuple[trajectory_pb2.Trajectory, ...] = ()
    """Rollouts that failed, oldest first, without their tokens; only with `history`."""
    num_finished: int = 0
    """Stored rollouts that finished with rewards; only with `history`."""
    progress: Progress | None = None
    """Steps and evaluations; without the run's folder the trainer's last step alone."""
    nodes: tuple[scheduler_pb.Node, ...] | None = None
    events: tuple[scheduler_pb.AllocationEvent, ...] = ()
    """The scheduler's audit log, oldest first; only with `history`."""
    trainer: trainer_pb.GetStatusResponse | None = None
    weights_answer: bool = False
    """Whether the weights service answered; it may have no version yet."""
    manifest: weight_pb.Manifest | None = None
    evaluations: evaluator_pb.GetEvaluationsResponse | None = None
    """From the evaluator; None too where the run has none."""
    gateway_serves: bool | None = None
    """Result of the gateway's health check."""
    servers: tuple[ServerSnapshot, ...] = ()
    """Every rollout server that a node offers."""
    server_uses: tuple[rollout_pb.ServerUse, ...] = ()
    """Every rollout server that the gateway knows; none of a gateway of release 0.2."""

    @property
    def answering_servers(self) -> Mapping[str, server_pb.GetServerInfoResponse]:
        """State of the rollout servers that answer, by node: of several the sums of their work."""
        found: dict[str, server_pb.GetServerInfoResponse] = {}
        for each in self.servers:
            if each.info is not None:
                before = found.get(each.node_id)
                found[each.node_id] = each.info if before is None else _joint(before, each.info)
        return found


def _joint(
    one: server_pb.GetServerInfoResponse, other: server_pb.GetServerInfoResponse
) -> server_pb.GetServerInfoResponse:
    """Two servers as one: with the older weights, and serving if one of them does."""
    serving = server_pb.SERVER_STATE_SERVING
    joint = server_pb.GetServerInfoResponse()
    joint.CopyFrom(one if one.state == serving else other)
    for name in ("num_running", "num_queued", "max_running", "tokens_per_second"):
        setattr(joint, name, getattr(one, name) + getattr(other, name))
    joint.weight_version = min(one.weight_version, other.weight_version)
    return joint


async def gather(
    endpoints: Endpoints,
    *,
    history: bool = False,
    progress_only: bool = False,
    seconds: float = _ANSWER_SECONDS,
    processes: Sequence[Process] | None = None,
) -> Snapshot:
    """Query all services concurrently.

    Args:
        endpoints: of the run; the channels stay open.
        history: add the audit log and the oldest rollout.
        progress_only: leave out the files of the run; without `processes` ask only trainer,
            trajectory manager, scheduler and rollout servers.
        seconds: that each call may take.
        processes: of the run; None: those that its folder or its addresses name.
    """
    if processes is None and not progress_only:
        processes = known_processes(endpoints)
    return await _Gatherer(endpoints, seconds, processes).all(history, progress_only)


@dataclass(slots=True)
class _Rollouts:
    """What is told of the stored rollouts, added oldest first."""

    oldest_running: trajectory_pb2.Trajectory | None = None
    failed: list[trajectory_pb2.Trajectory] = field(default_factory=list)
    num_finished: int = 0

    def add(self, trajectory: trajectory_pb2.Trajectory) -> None:
        is_running = trajectory.state == trajectory_pb2.ROLLOUT_STATE_RUNNING
        if is_running and self.oldest_running is None:
            self.oldest_running = trajectory
        if trajectory.HasField("failure"):
            self.failed.append(trajectory)
        self.num_finished += trajectory.HasField("rewards")


class _Gatherer:
    def __init__(
        self, endpoints: Endpoints, seconds: float, processes: Sequence[Process] | None
    ) -> None:
        self._endpoints, self._processes = endpoints, processes
        self._clients = RunClients(endpoints)
        self._seconds = seconds
        self._run_id = endpoints.run_id
        self._problems: dict[str, SeamflowError] = {}

    async def all(self, history: bool, progress_only: bool) -> Snapshot:
        now = time.time()
        asking = asyncio.create_task(self._trainer())
        if self._run_id is None:
            self._run_id = trainer.run_id if (trainer := await asking) else None
        others = None
        if self._processes is not None:
            others = asyncio.ensure_future(asyncio.gather(*self._others()))
        first = asyncio.gather(self._trajectory_manager(history), self._scheduler(history))
        (readiness, rollouts), (nodes, events, servers) = await first
        snapshot = Snapshot(
            now=now,
            run_id=self._run_id,
            agents=self._endpoints.agents,
            logs=str(self._endpoints.folder / "logs") if self._endpoints.folder else "",
            started=self._endpoints.started,
            addresses=self._endpoints.services,
            zones=self._endpoints.zones,
            problems=self._problems,
            readiness=readiness,
            oldest_rollout=rollouts.oldest_running,
            failed_rollouts=tuple(rollouts.failed),
            num_finished=rollouts.num_finished,
            nodes=nodes,
            events=events,
            trainer=await asking,
            servers=servers,
        )
        if others is None:
            return snapshot
        manifest, gateway, uses, evaluations, processes = await others
        return replace(
            snapshot,
            processes=processes,
            lives=tuple(lives(self._endpoints.folder)) if self._endpoints.folder else (),
            free_bytes=self._free_bytes(),
            progress=None
            if progress_only
            else await self._progress(snapshot.trainer, readiness, evaluations),
            evaluations=evaluations,
            weights_answer=manifest is not None,
            manifest=manifest.manifest if manifest and manifest.HasField("manifest") else None,
            gateway_serves=gateway,
            server_uses=uses,
        )

    def _others(self) -> tuple[Any, ...]:
        processes = look(self._processes or (), self._endpoints, self._seconds)
        services = self._manifest(), self._gateway(), self._server_uses(), self._evaluations()
        return *services, processes

    def _free_bytes(self) -> int | None:
        folder = self._endpoints.folder
        return None if folder is None else shutil.disk_usage(folder).free

    async def _trainer(self) -> trainer_pb.GetStatusResponse | None:
        request = trainer_pb.GetStatusRequest()
        stub = self._clients.trainer
        return await self._ask("trainer", lambda: stub.GetStatus(request, timeout=self._seconds))

    async def _trajectory_manager(
        self, history: bool
    ) -> tuple[sample_pb.Readiness | None, _Rollouts]:
        name = "trajectory_manager"
        if not self._run_is_known(name):
            return None, _Rollouts()
        request = sample_pb.GetReadinessRequest(run_id=self._run_id or "")
        stub = self._clients.samples
        answer = await self._ask(name, lambda: stub.GetReadiness(request, timeout=self._seconds))
        readiness = answer.readiness if answer is not None else None
        if readiness is None or not history:
            return readiness, _Rollouts()
        return readiness, await self._ask(name, self._rollouts) or _Rollouts()

    async def _progress(
        self,
        trainer: trainer_pb.GetStatusResponse | None,
        readiness: sample_pb.Readiness | None,
        evaluations: evaluator_pb.GetEvaluationsResponse | None,
    ) -> Progress:
        if self._endpoints.folder is not None:
            progress = read_progress(self._endpoints.folder)
        else:
            steps = [trainer.metrics] if trainer and trainer.metrics else []
            progress = Progress(steps=steps, evaluations=_lines(evaluations))
        tasks = self._clients.tasks
        counted = partial(equal_groups_discarded, tasks, self._run_id or "", progress, readiness)
        return with_counts(progress, readiness, await self._ask("trajectory_manager", counted) or 0)

    async def _rollouts(self) -> _Rollouts:
        stub, found = self._clients.trajectories, _Rollouts()
        request = trajectory_service_pb2.ListTrajectoriesRequest(
            run_id=self._run_id or "", page_size=1000, headers_only=True
        )
        listed = pages(lambda page: stub.ListTrajectories(page, timeout=self._seconds), request)
        async for page in listed:
            for trajectory in page.trajectories:
                found.add(trajectory)
        return found

    async def _scheduler(
        self, history: bool
    ) -> tuple[
        tuple[scheduler_pb.Node, ...] | None,
        tuple[scheduler_pb.AllocationEvent, ...],
        tuple[ServerSnapshot, ...],
    ]:
        stub = self._clients.scheduler
        request = scheduler_pb.ListNodesRequest(run_id=self._run_id or "")
        listed = pages(lambda page: stub.ListNodes(page, timeout=self._seconds), request)
        nodes = await self._ask("scheduler", lambda: _all_nodes(listed))
        if nodes is None:
            return None, (), ()
        events = await self._events() if history else ()
        return nodes, events, await self._servers(nodes)

    async def _events(self) -> tuple[scheduler_pb.AllocationEvent, ...]:
        stub = self._clients.scheduler
        request = scheduler_pb.WatchAllocationsRequest(run_id=self._run_id or "")
        events: list[scheduler_pb.AllocationEvent] = []
        try:
            async for response in stub.WatchAllocations(request, timeout=_AUDIT_LOG_SECONDS):
                events.extend(response.events)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                self._problems["scheduler"] = decode(error)
        except SeamflowError as error:
            self._problems["scheduler"] = error
        return tuple(events)

    async def _servers(self, nodes: Iterable[scheduler_pb.Node]) -> tuple[ServerSnapshot, ...]:
        offered = [
            (node.node_id, worker.address)
            for node in nodes
            for worker in node.workers
            if worker.tag == "rollout"
        ]
        return tuple(await asyncio.gather(*(self._server(*server) for server in offered)))

    async def _server(self, node_id: str, address: str) -> ServerSnapshot:
        stub = async_stub(RolloutServerServiceStub, self._endpoints.channel(address))
        info: server_pb.GetServerInfoResponse | None = None
        with suppress(*_NO_ANSWER):
            info = await stub.GetServerInfo(server_pb.GetServerInfoRequest(), timeout=self._seconds)
        return ServerSnapshot(node_id=node_id, address=address, info=info)

    async def _manifest(self) -> weight_pb.GetManifestResponse | None:
        if not self._run_is_known("weights"):
            return None
        request = weight_pb.GetManifestRequest(run_id=self._run_id or "")
        stub = self._clients.weights
        return await self._ask("weights", lambda: stub.GetManifest(request, timeout=self._seconds))

    async def _evaluations(self) -> evaluator_pb.GetEvaluationsResponse | None:
        name = "evaluator"
        if name not in self._endpoints.services or not self._run_is_known(name):
            return None
        request = evaluator_pb.GetEvaluationsRequest(run_id=self._run_id or "")
        stub = self._clients.evaluator
        return await self._ask(name, lambda: stub.GetEvaluations(request, timeout=self._seconds))

    async def _gateway(self) -> bool | None:
        # A raw call: the stub of grpc.health is a dependency that the SDK does not have.
        channel = self._endpoints.to("gateway")
        check: Callable[..., Awaitable[bytes]] = channel.unary_unary("/grpc.health.v1.Health/Check")
        answer = await self._ask("gateway", lambda: check(b"", timeout=self._seconds))
        return None if answer is None else answer == _HEALTHY

    async def _server_uses(self) -> tuple[rollout_pb.ServerUse, ...]:
        stub = async_stub(RolloutServiceStub, self._endpoints.to("gateway"))
        request = rollout_pb.ListServersRequest(run_id=self._run_id or "")
        try:
            return tuple((await stub.ListServers(request, timeout=self._seconds)).servers)
        except _NO_ANSWER:
            return ()  # the health check tells whether it answers

    def _run_is_known(self, service: str) -> bool:
        if self._run_id is None:
            self._problems[service] = PreconditionError(
                "the run is unknown, as no trainer reports it: name it with --run or SEAMFLOW_RUN"
            )
        return self._run_id is not None

    async def _ask(self, service: str, call: Callable[[], Awaitable[T]]) -> T | None:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            self._problems[service] = decode(error)
        except SeamflowError as error:  # no connection was ever made
            self._problems[service] = error
        return None


def _lines(said: evaluator_pb.GetEvaluationsResponse | None) -> Sequence[Mapping[str, Any]]:
    """Evaluations with a result, as evaluation.jsonl has them."""
    return [
        {
            "step": line.step,
            "metric": line.metric,
            "mean": line.mean,
            "interval": (line.low, line.high) if line.HasField("low") else None,
            "goal": "min" if line.smaller_is_better else "max",
        }
        for line in (said.evaluations if said is not None else ())
        if line.HasField("mean")
    ]


async def _all_nodes(
    listed: AsyncIterator[scheduler_pb.ListNodesResponse],
) -> tuple[scheduler_pb.Node, ...]:
    return tuple([node async for page in listed for node in page.nodes])
