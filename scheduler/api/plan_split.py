"""PlanSplit: from request to response, with validation."""

from __future__ import annotations

from seamflow.durations import seconds_of, to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from scheduler.model.stage_profile import StageProfile
from scheduler.policy.node_split import Split, split_datacentres, split_nodes
from services.chassis.errors import invalid_argument

MAX_NODES = 10_000
"""Largest number of nodes of a split: about 10 ms, in which no heartbeat is answered."""

_TWO_DATACENTRES = ("num_generation_nodes", "num_training_nodes")


def split_message(request: pb.PlanSplitRequest) -> pb.PlanSplitResponse:
    """Compute the requested split.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    split = _split(request)
    return pb.PlanSplitResponse(
        num_generation_nodes=split.generation_nodes,
        num_training_nodes=split.training_nodes,
        generation_duration=to_duration(split.generation_seconds),
        training_duration=to_duration(split.training_seconds),
    )


def _split(request: pb.PlanSplitRequest) -> Split:
    generation = _profile("generation", request.generation)
    training = _profile("training", request.training)
    if request.num_nodes:
        for field in _TWO_DATACENTRES:
            if getattr(request, field):
                cure = "omit it, or omit num_nodes and give both datacentres"
                raise invalid_argument(field, getattr(request, field), cure)
        _check_nodes(request, "num_nodes", generation.nodes[0] + training.nodes[0])
        return split_nodes(generation.seconds, training.seconds, request.num_nodes)
    if not any(getattr(request, field) for field in _TWO_DATACENTRES):
        cure = "give it, or num_generation_nodes and num_training_nodes"
        raise invalid_argument("num_nodes", 0, cure)
    for field, profile in zip(_TWO_DATACENTRES, (generation, training), strict=True):
        _check_nodes(request, field, profile.nodes[0])
    return split_datacentres(
        generation.seconds,
        training.seconds,
        request.num_generation_nodes,
        request.num_training_nodes,
    )


def _profile(field: str, message: pb.StageProfile) -> StageProfile:
    try:
        return StageProfile.of({n: seconds_of(each) for n, each in message.durations.items()})
    except ValueError as error:
        points = f"{len(message.durations)} points"
        raise invalid_argument(f"{field}.durations", points, str(error)) from error


def _check_nodes(request: pb.PlanSplitRequest, field: str, fewest: int) -> None:
    count = getattr(request, field)
    if not fewest <= count <= MAX_NODES:
        cure = f"give {fewest}, the smallest number in the profile, to {MAX_NODES}"
        raise invalid_argument(field, count, cure)
