"""What mixes of gangs are played against: the rules by themselves, or a scheduler over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING

from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from scheduler.model.records import Gang, Node, NodeState, RunPolicy, State, Worker
from scheduler.policy.allocation_policy import AllocationPolicy
from scheduler.pool.state_transaction import StateTransaction
from tests.chaos.scheduler.mixes.mixes import Ask, Machine, Place

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

_DRAIN_SECONDS = 15.0
_ROLLOUT = "rollout"
_ADDRESS = "127.0.0.1:1"


class VirtualWorld:
    """The scheduler's drafts and a policy, by a clock that is set."""

    def __init__(self, policy: AllocationPolicy) -> None:
        self._policy = policy
        self._state = State()
        self._now = 0.0
        self._states: list[Mapping[str, Place]] = []

    async def join(self, machine: Machine) -> None:
        """See `World.join`."""
        node = Node(
            node_id=machine.name,
            run_id=machine.runs[0],
            capability_tags=tuple(sorted((_ROLLOUT, *machine.tags))),
            workers=tuple(
                Worker(tag=tag, address=_ADDRESS, run_id=run_id)
                for tag in (_ROLLOUT, *machine.tags)
                for run_id in machine.runs
            ),
        )
        self._change(lambda tx: tx.register(node))

    async def fail(self, machine: Machine) -> None:
        """See `World.fail`."""
        self._change(lambda tx: tx.lose([machine.name]))

    async def drain(self, machine: Machine, expected: bool) -> None:
        """See `World.drain`."""
        self._change(lambda tx: tx.drain(machine.name, expected))

    async def obey(self, machines: Iterable[Machine]) -> None:
        """See `World.obey`."""
        for machine in machines:
            assignment = self._state.nodes[machine.name].assignment
            state = NodeState.ACTIVE if assignment.tag else NodeState.IDLE
            report = (machine.name, state, assignment.epoch, assignment.epoch)
            self._change(methodcaller("report", *report))

    async def request(self, asks: Sequence[Ask]) -> None:
        """See `World.request`."""
        for ask in asks:
            gang = Gang(
                run_id=ask.run_id,
                gang_id=ask.gang_id,
                tag=ask.tag,
                num_nodes=ask.num_nodes,
                needed_time=self._now + ask.delay_seconds if ask.delay_seconds else None,
            )
            self._change(methodcaller("request", gang))

    async def release(self, ask: Ask) -> None:
        """See `World.release`."""
        self._change(lambda tx: tx.release(ask.name))

    async def set_policy(self, run_id: str, priority: int, max_nodes: int) -> None:
        """See `World.set_policy`."""
        policy = RunPolicy(priority=priority, max_nodes=max_nodes)
        self._change(lambda tx: tx.set_run_policy(run_id, policy))

    async def pass_time(self, seconds: float) -> None:
        """See `World.pass_time`."""
        self._now += seconds
        self._change(lambda tx: tx.mark_overdue(_DRAIN_SECONDS))
        self._change(lambda tx: tx.replan("time passed"))

    async def states(self) -> Sequence[Mapping[str, Place]]:
        """See `World.states`."""
        states, self._states = [*self._states, self._places()], []
        return states

    def _places(self) -> Mapping[str, Place]:
        return {
            name: Place(
                gang=(node.assigned_run, node.assignment.gang_id),
                rank=node.assignment.rank_offset,
                size=node.assignment.world_size,
            )
            for name, node in self._state.nodes.items()
            if node.assignment.gang_id
        }

    def _change(self, change: Callable[[StateTransaction], object]) -> None:
        tx = StateTransaction(self._state, self._policy, self._now)
        change(tx)
        self._state = tx.state
        self._states.append(self._places())


class RealWorld:
    """A scheduler over gRPC, whose nodes are calls and nothing else. Nothing has to wait here.

    A node that is gone has said so: how long a silent one is waited for is not in question.
    """

    def __init__(self, scheduler: SchedulerServiceAsyncStub) -> None:
        self._scheduler = scheduler

    async def join(self, machine: Machine) -> None:
        """See `World.join`."""
        tags = (_ROLLOUT, *machine.tags)
        request = pb.RegisterNodeRequest(
            node_id=machine.name,
            run_id=machine.runs[0],
            capability_tags=tags,
            workers=[
                pb.Worker(tag=tag, address=_ADDRESS, run_id=run_id)
                for tag in tags
                for run_id in machine.runs
            ],
        )
        await self._scheduler.RegisterNode(request)

    async def fail(self, machine: Machine) -> None:
        """See `World.fail`."""
        # Asked anew: who goes without knowing its assignment has not gone.
        (node,) = [node for node in await self._nodes() if node.node_id == machine.name]
        await self._report(node, pb.NODE_STATE_DRAINING)

    async def drain(self, machine: Machine, expected: bool) -> None:
        """See `World.drain`."""
        request = pb.DrainNodeRequest(node_id=machine.name, drain=expected)
        await self._scheduler.DrainNode(request)

    async def obey(self, machines: Iterable[Machine]) -> None:
        """See `World.obey`."""
        names = {machine.name for machine in machines}
        message = [node for node in await self._nodes() if node.node_id in names]
        active, idle = pb.NODE_STATE_ACTIVE, pb.NODE_STATE_IDLE
        reports = [self._report(node, active if node.assignment.tag else idle) for node in message]
        await asyncio.gather(*reports)

    async def request(self, asks: Sequence[Ask]) -> None:
        """See `World.request`."""
        requests = [
            pb.RequestNodesRequest(
                run_id=ask.run_id, gang_id=ask.gang_id, tag=ask.tag, num_nodes=ask.num_nodes
            )
            for ask in asks
        ]
        await asyncio.gather(*map(self._scheduler.RequestNodes, requests))

    async def release(self, ask: Ask) -> None:
        """See `World.release`."""
        request = pb.ReleaseNodesRequest(run_id=ask.run_id, gang_id=ask.gang_id)
        await self._scheduler.ReleaseNodes(request)

    async def set_policy(self, run_id: str, priority: int, max_nodes: int) -> None:
        """See `World.set_policy`."""
        policy = pb.RunPolicy(priority=priority, max_nodes=max_nodes)
        await self._scheduler.SetRunPolicy(pb.SetRunPolicyRequest(run_id=run_id, policy=policy))

    async def pass_time(self, seconds: float) -> None:
        """See `World.pass_time`."""

    async def states(self) -> Sequence[Mapping[str, Place]]:
        """See `World.states`."""
        present = {
            node.node_id: Place(
                gang=(node.assignment.run_id or node.run_id, node.assignment.gang_id),
                rank=node.assignment.node_index,
                size=node.assignment.num_gang_nodes,
            )
            for node in await self._nodes()
            if node.assignment.gang_id
        }
        return [present]

    async def leave(self) -> None:
        """All nodes go: the next mix has others of the same names."""
        for name in [node.node_id for node in await self._nodes()]:
            await self.fail(Machine(name=name, tags=(), runs=()))

    async def _nodes(self) -> Sequence[pb.Node]:
        answer = await self._scheduler.ListNodes(pb.ListNodesRequest())
        return answer.nodes

    async def _report(self, node: pb.Node, state: pb.NodeState.ValueType) -> None:
        """The node stands at `state` for what it was told last."""
        epoch = node.assignment.epoch
        report = pb.HeartbeatRequest(
            node_id=node.node_id, state=state, reported_epoch=epoch, known_epoch=epoch
        )
        await self._scheduler.Heartbeat(report)
