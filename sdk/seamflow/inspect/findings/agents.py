"""No agent takes the tasks that wait, or rollouts of agents fail."""

from __future__ import annotations

from collections.abc import Iterator

from seamflow.inspect.diagnosis import Finding, groups, published
from seamflow.inspect.failure_causes import causes
from seamflow.inspect.snapshot import Snapshot

_START_SECONDS = 60.0
"""Within which agents of a new run need not have come yet."""

_MAX_CAUSES = 3


def no_agents(snapshot: Snapshot) -> Iterator[Finding]:
    """Tasks wait, admission is open, and nobody leases: by the kind of agent of the run."""
    ready = snapshot.readiness
    if ready is None or not ready.num_queued_tasks or not ready.num_admissible_groups:
        return
    if ready.num_running_rollouts:
        return  # agents are busy; they lease more as they finish
    is_new = snapshot.started is not None and snapshot.now - snapshot.started < _START_SECONDS
    yield Finding(
        rule="no_agents",
        sentence=f"{ready.num_queued_tasks} tasks wait for an agent: {_awaited(snapshot)}, though "
        f"{groups(ready.num_admissible_groups)} may start.",
        cure=("The run was just started. " if is_new else "") + _agent_cure(snapshot),
        since=published(snapshot),
        normal=is_new,
    )


def _awaited(snapshot: Snapshot) -> str:
    kinds = {
        "runner": "the agent runner leases none",
        "program": "the program of agent_command leases none",
        "environment": "no episode of the environment begins",
        "outside": "no agent from outside leases one",
    }
    return kinds.get(snapshot.agents, "nobody leases them")


def _agent_cure(snapshot: Snapshot) -> str:
    """What to do, by the kind of agent that the run was started with."""
    logs = {
        "runner": "agent_runner.log",
        "program": "agent.log",
        "environment": "environments-*.log and environment_server-*.log (or tool_loop-*.log)",
    }
    if snapshot.agents in logs:
        return f"{snapshot.logs}/{logs[snapshot.agents]} says why."
    if snapshot.agents == "outside":
        return (
            "Start an agent: it leases by POST /rollouts/lease at http_gateway of addresses.json "
            "in the run folder, or by gRPC (docs/agents.md)."
        )
    return (
        "Start one with `python -m seamflow.runner --agent package.module:Class --run-id "
        f"{snapshot.run_id}`, or one that leases over HTTP (docs/agents.md); if one runs, see its "
        "log for why it cannot reach the gateway."
    )


def failed_rollouts(snapshot: Snapshot) -> Iterator[Finding]:
    """The most frequent causes; `normal` while more rollouts finish than fail."""
    normal = snapshot.num_finished > len(snapshot.failed_rollouts)
    for cause in causes(snapshot.failed_rollouts)[:_MAX_CAUSES]:
        plural = "s" if cause.number > 1 else ""
        yield Finding(
            rule="rollouts_fail",
            sentence=f"{cause.number} rollout{plural} failed and "
            f"{'were' if plural else 'was'} not scored, {snapshot.num_finished} finished; last "
            f"{cause.line}.",
            cure=f"{cause.cure} `seamflow tail {cause.rollout_id}` shows what led to it.",
            normal=normal,
        )
