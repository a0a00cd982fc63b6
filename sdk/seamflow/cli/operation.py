"""Commands about the pool of nodes that runs share, and to one worker of it."""

from __future__ import annotations

import argparse

import grpc.aio

from seamflow.cli.parser import Verbs
from seamflow.durations import seconds_of
from seamflow.errors import UnavailableError, decode
from seamflow.inspect.diagnosis import activity
from seamflow.inspect.endpoints import Endpoints, reached, required_run
from seamflow.pages import pages
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

_SECONDS = 10.0
_ADVICE = {
    pb.SPLIT_ADVICE_KEEP: "keep the split",
    pb.SPLIT_ADVICE_ADD_GENERATION: "add a node that generates",
}

_WORK_SECONDS = 890.0
"""Both wait for work in progress; below the servers' cap on unary calls."""


def register(verbs: Verbs) -> None:
    """Add `seamflow drain`, `pool`, `set-policy`, and the commands to one worker."""
    draining = verbs.add("drain", "Give a node no new work; its current work moves.", drain)
    draining.add_argument("node")
    draining.add_argument("--undo", action="store_true", help="let it take work again")
    shown = verbs.add("pool", "The runs that share the pool of nodes.", pool)
    shown.add_argument("--gang", help="show what its request for nodes would change instead")
    shown.add_argument("--nodes", type=int, default=1, help="of the gang, all or none (1)")
    shown.add_argument("--tag", default="train", help="capability tag of the gang (train)")
    policy = verbs.add("set-policy", "Set priority and quota of a run in the pool.", set_policy)
    policy.add_argument("--priority", type=int, default=0, help="higher gangs go first (0)")
    policy.add_argument("--max-nodes", type=int, default=0, help="quota; 0 for none")
    policy.add_argument("--rollout-share", type=float, default=1.0, help="of free nodes (1)")
    _register_workers(verbs)


async def drain(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Give a node no new work, or with --undo let it take work again."""
    request = pb.DrainNodeRequest(node_id=given.node, drain=not given.undo)
    async with reached(endpoints, "scheduler") as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        node = (await stub.DrainNode(request, timeout=_SECONDS)).node
    what = "takes work again" if given.undo else "is drained: no new work, current work moves"
    print(f"{node.node_id} {what}; now assigned to {activity(node)}")
    return 0


async def pool(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Print every run of the pool, or what a request for nodes would change, without making it."""
    if given.gang:
        return await _would_change(given, endpoints)
    async with reached(endpoints, "scheduler") as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        listed = pages(lambda page: stub.ListRuns(page, timeout=_SECONDS), pb.ListRunsRequest())
        async for page in listed:
            for run in page.runs:
                print(_run_text(run))
    return 0


async def set_policy(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Set priority, quota and share of the run that --run names."""
    run_id = required_run(endpoints)
    policy = pb.RunPolicy(
        priority=given.priority, max_nodes=given.max_nodes, rollout_share=given.rollout_share
    )
    async with reached(endpoints, "scheduler") as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        request = pb.SetRunPolicyRequest(run_id=run_id, policy=policy)
        await stub.SetRunPolicy(request, timeout=_SECONDS)
    print(f"run {run_id}: {_policy_text(policy)}")
    return 0


async def _would_change(given: argparse.Namespace, endpoints: Endpoints) -> int:
    request = pb.RequestNodesRequest(
        run_id=required_run(endpoints), gang_id=given.gang, tag=given.tag, num_nodes=given.nodes
    )
    async with reached(endpoints, "scheduler") as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        plan = await stub.PlanAssignments(
            pb.PlanAssignmentsRequest(requests=[request]), timeout=_SECONDS
        )
    for node in plan.nodes:
        print(f"{node.node_id} would change to {node.assignment.tag or 'nothing'}")
    for gang in plan.unplaced_gangs:
        print(f"gang {gang.gang_id} of run {gang.run_id} would wait: {gang.cause}")
    if not (plan.nodes or plan.unplaced_gangs):
        print("nothing would change")
    return 0


def _run_text(run: pb.Run) -> str:
    nodes = ", ".join(f"{n} {tag}" for tag, n in sorted(run.num_nodes.items())) or "no nodes"
    waiting = ", ".join(run.waiting_gang_ids)
    lines = [f"{run.run_id}  {nodes}; {_policy_text(run.policy)}"]
    lines += [f"    waiting gangs: {waiting}"] if waiting else []
    lines += [_times_text(times) for times in run.stage_times]
    return "\n".join(lines)


def _policy_text(policy: pb.RunPolicy) -> str:
    quota = f"at most {policy.max_nodes} nodes" if policy.max_nodes else "no quota"
    return f"priority {policy.priority}, {quota}, rollout share {policy.rollout_share or 1:g}"


def _times_text(times: pb.StageTimes) -> str:
    generation, training = times.generation_duration, times.training_duration
    return (
        f"    gang {times.gang_id}: generation {seconds_of(generation):.3g} s, training "
        f"{seconds_of(training):.3g} s: {_ADVICE.get(times.advice, 'no advice')}"
    )


def _register_workers(verbs: Verbs) -> None:
    """Add `seamflow update-weights`, `save-checkpoint` and `set-replicas`."""
    about = "Let a rollout server load weights now."
    update = verbs.add("update-weights", about, update_weights)
    update.add_argument("server", metavar="HOST:PORT")
    update.add_argument("--version", type=int, help="a committed version; default: the newest")
    verbs.add("save-checkpoint", "Let the trainer write a checkpoint now.", save_checkpoint)
    about = "Set the number of model copies that train, from the trainer's next step on."
    verbs.add("set-replicas", about, set_replicas).add_argument("replicas", type=int)


async def update_weights(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Let a rollout server load committed weights now; prints the version it then serves."""
    request = server_pb.UpdateWeightsRequest(weight_version=given.version)
    stub = async_stub(RolloutServerServiceStub, endpoints.channel(given.server))
    try:
        response = await stub.UpdateWeights(request, timeout=_WORK_SECONDS)
    except grpc.aio.AioRpcError as failure:
        error = decode(failure)
        if isinstance(error, UnavailableError) and not error.reason:
            message = f"the rollout server at {given.server} does not answer: {error}"
            raise UnavailableError(message) from failure
        raise error from failure
    print(f"rollout server {given.server} serves v{response.weight_version}")
    return 0


async def save_checkpoint(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Let the trainer write a checkpoint at its next step boundary; prints the step."""
    async with reached(endpoints, "trainer") as channel:
        stub = async_stub(TrainerServiceStub, channel)
        request = trainer_pb.SaveCheckpointRequest()
        response = await stub.SaveCheckpoint(request, timeout=_WORK_SECONDS)
    print(f"checkpoint of step {response.step} is durable")
    return 0


async def set_replicas(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Set how many data-parallel copies of the models train; prints that they follow."""
    async with reached(endpoints, "trainer") as channel:
        stub = async_stub(TrainerServiceStub, channel)
        await stub.SetReplicas(trainer_pb.SetReplicasRequest(replicas=given.replicas))
    print(f"the next step begins with {given.replicas} replicas")
    return 0
