"""Commands about the runs that share the pool of nodes, and about plans for it."""

from __future__ import annotations

import argparse

from seamflow.cli.endpoints import Endpoints, UsageError, reached
from seamflow.durations import seconds_of, to_duration
from seamflow.pages import pages
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub

__all__ = ["plan_nodes", "plan_split", "pool", "profile", "set_policy"]

_SECONDS = 10.0
_ADVICE = {
    pb.SPLIT_ADVICE_KEEP: "keep the split",
    pb.SPLIT_ADVICE_ADD_GENERATION: "add a node that generates",
}


async def pool(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Print every run of the pool: policy, nodes, waiting gangs, advice."""
    async with reached(endpoints, "scheduler") as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        listed = pages(lambda page: stub.ListRuns(page, timeout=_SECONDS), pb.ListRunsRequest())
        async for page in listed:
            for run in page.runs:
                print(_run_text(run))
    return 0


async def set_policy(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Set priority, quota and share of the run that --run names."""
    run_id = _named_run(endpoints)
    policy = pb.RunPolicy(
        priority=given.priority, max_nodes=given.max_nodes, rollout_share=given.rollout_share
    )
    async with reached(endpoints, "scheduler") as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        request = pb.SetRunPolicyRequest(run_id=run_id, policy=policy)
        await stub.SetRunPolicy(request, timeout=_SECONDS)
    print(f"run {run_id}: {_policy_text(policy)}")
    return 0


async def plan_nodes(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Print what a request for nodes would change, without making it."""
    request = pb.RequestNodesRequest(
        run_id=_named_run(endpoints), gang_id=given.gang, tag=given.tag, num_nodes=given.nodes
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


async def plan_split(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Print how many nodes should generate and how many should train."""
    request = pb.PlanSplitRequest(
        generation=profile("--generation", given.generation),
        training=profile("--training", given.training),
        num_nodes=given.nodes,
        num_generation_nodes=given.generation_nodes,
        num_training_nodes=given.training_nodes,
    )
    async with reached(endpoints, "scheduler") as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        split = await stub.PlanSplit(request, timeout=_SECONDS)
    print(
        f"{split.num_generation_nodes} nodes generate in {seconds_of(split.generation_duration):g} "
        f"s, {split.num_training_nodes} train in {seconds_of(split.training_duration):g} s"
    )
    return 0


def profile(flag: str, text: str) -> pb.StageProfile:
    """A profile from "NODES=SECONDS,…". Raises `UsageError` for another form."""
    try:
        points = dict(point.split("=") for point in text.split(","))
        durations = {int(nodes): to_duration(float(each)) for nodes, each in points.items()}
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{flag} {text!r}: write it as NODES=SECONDS,…: 8=500,64=62.5") from error
    return pb.StageProfile(durations=durations)


def _named_run(endpoints: Endpoints) -> str:
    if not endpoints.run_id:
        raise UsageError("--run is missing: name the run, or set SEAMFLOW_RUN")
    return endpoints.run_id


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
