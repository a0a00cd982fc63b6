"""A negative control: an allocation policy that gives a gang whatever there is.

`--policy tests.chaos.scheduler.controls.partial_gangs:GreedyPolicy`. In everything else it is
the built-in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.model.records import Assignment, Gang, Node, RunPolicy
from scheduler.policy.allocation_policy import Plan, PreemptivePolicy

_NO_RUNS: Mapping[str, RunPolicy] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyPolicy(PreemptivePolicy):
    """Hands nodes out one by one in order of arrival, also to gangs that cannot be completed."""

    def plan(
        self,
        nodes: Sequence[Node],
        gangs: Sequence[Gang],
        now: float,
        runs: Mapping[str, RunPolicy] = _NO_RUNS,
    ) -> Plan:
        """See `AllocationPolicy.plan`, whose promise it breaks."""
        free = {node.node_id: node for node in nodes if node.available}
        # Who has a node keeps it.
        teams = {gang.key: [n for n in free.values() if n.gang_key == gang.key] for gang in gangs}
        for team in teams.values():
            for node in team:
                del free[node.node_id]
        for gang in sorted(gangs, key=lambda gang: gang.arrival):
            team = teams[gang.key]
            able = [node for node in free.values() if gang.run_id in node.runs_for(gang.tag)]
            for node in able[: max(0, gang.num_nodes - len(team))]:
                team.append(free.pop(node.node_id))
        held = {
            node.node_id: Assignment(
                tag=gang.tag,
                gang_id=gang.gang_id,
                run_id=gang.run_id,
                rank_offset=rank,
                world_size=gang.num_nodes,
            )
            for gang in gangs
            for rank, node in enumerate(teams[gang.key])
        }
        waiting = {gang.key: "nodes" for gang in gangs if not teams[gang.key]}
        return Plan(assignments=held, waiting=waiting)
