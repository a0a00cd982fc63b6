"""A failed stage's micro-batches go through its peers (ReCycle, arXiv 2405.14009).

Data-parallel replicas of a pipeline have the same weights at the same stage, so a replica whose
node is lost sends each micro-batch through a peer's node of that stage. Planned as pipelines that
share nodes.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.pipeline.fused_schedule.problem import Pipeline, Problem


def replicated(pipeline: Pipeline, replicas: int) -> Problem:
    """Healthy: each replica on nodes of its own."""
    return Problem(pipelines=tuple(_on(pipeline, number) for number in range(replicas)))


def rerouted(pipeline: Pipeline, replicas: int, failed_stage: int) -> Problem:
    """The node of `failed_stage` of the last replica is lost; its peers share its micro-batches.

    Raises:
        ValueError: no peer is left, or there is no such stage.
    """
    if replicas < 2:
        raise ValueError(f"replicas is {replicas}: rerouting needs at least 2")
    if not 0 <= failed_stage < pipeline.num_stages:
        raise ValueError(f"failed_stage is {failed_stage}: give 0..{pipeline.num_stages - 1}")
    peers = [_on(pipeline, number) for number in range(replicas - 1)]
    lost = _on(pipeline, replicas - 1)
    parts = [
        replace(lost, nodes=_through(lost, peer, failed_stage), num_micro_batches=count)
        for peer, count in zip(peers, _shares(lost.num_micro_batches, len(peers)), strict=True)
        if count
    ]
    return Problem(pipelines=(*peers, *parts))


def dropped_seconds(pipeline: Pipeline, replicas: int) -> float:
    """The alternative: the other replicas take all micro-batches of the one that is dropped."""
    share = -(-replicas * pipeline.num_micro_batches // (replicas - 1))
    return replace(pipeline, num_micro_batches=share).seconds_alone


def _on(pipeline: Pipeline, number: int) -> Pipeline:
    first = number * pipeline.num_stages
    return replace(pipeline, nodes=tuple(range(first, first + pipeline.num_stages)))


def _through(lost: Pipeline, peer: Pipeline, failed_stage: int) -> tuple[int, ...]:
    return tuple(
        peer.nodes[stage] if stage == failed_stage else node
        for stage, node in enumerate(lost.nodes)
    )


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]
