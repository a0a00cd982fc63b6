"""Findings of why-stuck on agents, evaluations, places of a run and its rollout servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from seamflow.durations import seconds_of
from seamflow.errors import DeadlineError, UnavailableError
from seamflow.evaluator.v1 import evaluator_service_pb2 as pb
from seamflow.inspect.diagnosis import (
    GATEWAY_VERSION_LAG,
    Finding,
    created,
    groups,
    heartbeat,
    is_current,
    is_trainer,
    last_event,
    loading_addresses,
    published,
    server_state,
    state_of,
    still_processes,
)
from seamflow.inspect.endpoints import SERVICES
from seamflow.inspect.failure_causes import causes
from seamflow.inspect.lives import stops
from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

_STATES: Mapping[int, str] = {
    pb.EVALUATOR_STATE_BEFORE_TRAINING: "before training",
    pb.EVALUATOR_STATE_BESIDE_TRAINING: "beside training",
    pb.EVALUATOR_STATE_AFTER_TRAINING: "after training",
    pb.EVALUATOR_STATE_FINISHED: "finished",
}

_START_SECONDS = 60.0
"""Within which agents that were just started need not have come yet."""

_MAX_CAUSES = 3

_FEWEST_PARTS = 2
"""A single silent process says nothing of a link."""


def waits_for_evaluation(snapshot: Snapshot) -> bool:
    """Whether tasks are held back until the first weights are evaluated."""
    return _is(snapshot, pb.EVALUATOR_STATE_BEFORE_TRAINING)


def first_evaluation(snapshot: Snapshot) -> Iterator[Finding]:
    """Training has not begun, as the first weights are evaluated."""
    if waits_for_evaluation(snapshot):
        yield Finding(
            rule="first_evaluation",
            sentence=f"Training waits for the evaluation of the first weights: {_done(snapshot)}.",
            cure="Agents run its rollouts; if their number does not grow, see the log of the "
            "agents and that of the evaluator.",
            since=snapshot.started,
            normal=True,
        )


def last_evaluation(snapshot: Snapshot) -> Iterator[Finding]:
    """Training is over, and its last weights are evaluated."""
    if _is(snapshot, pb.EVALUATOR_STATE_AFTER_TRAINING):
        yield Finding(
            rule="last_evaluation",
            sentence=f"Training is over; its last weights are evaluated: {_done(snapshot)}.",
            cure="Agents run its rollouts; the run ends after it.",
            normal=True,
        )


def evaluation_lines(snapshot: Snapshot) -> Iterator[str]:
    """State, the newest result and the best one, for people."""
    said = snapshot.evaluations
    if said is None:
        return
    running = f", {_done(snapshot)}" if said.num_rollouts else ""
    yield f"{_STATES.get(said.state, 'unknown')}{running}; {len(said.evaluations)} evaluations"
    results = [line for line in said.evaluations if line.HasField("mean")]
    if results:
        best = f"; best {_result(said.best)}" if said.HasField("best") else ""
        yield f"newest {_result(results[-1])}{best}"
    if said.best.checkpoint:
        yield f"best checkpoint {said.best.checkpoint}"
    if said.stopped_early:
        yield f"training ended early: {said.stopped_early}"


def _result(line: Any) -> str:
    return f"{line.metric} {line.mean:.3f} at step {line.step}"


def _is(snapshot: Snapshot, state: int) -> bool:
    return snapshot.evaluations is not None and snapshot.evaluations.state == state


def _done(snapshot: Snapshot) -> str:
    said = snapshot.evaluations
    assert said is not None
    if not said.num_rollouts:
        return "no rollout has begun"
    return f"{said.num_done} of {said.num_rollouts} rollouts are done"


def no_agents(snapshot: Snapshot) -> Iterator[Finding]:
    """Tasks wait, admission is open, and nobody leases: by the kind of agent of the run."""
    ready = snapshot.readiness
    if ready is None or not ready.num_admissible_groups:
        return
    if not ready.num_queued_tasks and not _bring_tasks(snapshot):
        return
    if ready.num_running_rollouts:
        return  # agents are busy; they lease more as they finish
    is_new = any(age < _START_SECONDS for age in _agents_ages(snapshot))
    yield Finding(
        rule="no_agents",
        sentence=f"{_waiting_tasks(ready.num_queued_tasks)}{_awaited(snapshot)}, though "
        f"{groups(ready.num_admissible_groups)} may start.",
        cure=("Little time has passed since the start. " if is_new else "") + _agent_cure(snapshot),
        since=published(snapshot),
        normal=is_new,
    )


def _agents_ages(snapshot: Snapshot) -> Iterator[float]:
    """Seconds since the start of each process of agents; without one, of the run."""
    names = ("agent", "agent_runner", "environments")
    states = (s for s in snapshot.processes if s.process.name.partition("-")[0] in names)
    ages = [state.age for state in states if state.age is not None]
    if not ages and snapshot.started is not None:
        ages = [snapshot.now - snapshot.started]
    yield from ages


def _waiting_tasks(number: int) -> str:
    return f"{number} tasks wait for an agent: " if number else "No rollout runs: "


def _bring_tasks(snapshot: Snapshot) -> bool:
    """Whether agents from outside have tasks of their own: the launcher runs no dataloader."""
    here = {each.process.name for each in snapshot.processes if each.process.pid}
    is_up = bool(here and snapshot.answering_servers)
    return is_up and snapshot.agents == "outside" and "dataloader" not in here


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
    found = causes(snapshot.failed_rollouts, stops(snapshot.lives))
    normal = snapshot.num_finished > sum(cause.number for cause in found)
    for cause in found[:_MAX_CAUSES]:
        plural = "s" if cause.number > 1 else ""
        yield Finding(
            rule="rollouts_fail",
            sentence=f"{cause.number} rollout{plural} failed and "
            f"{'were' if plural else 'was'} not scored, {snapshot.num_finished} finished; last "
            f"{cause.line}.",
            cure=f"{cause.cure} `seamflow tail {cause.rollout_id}` shows what led to it.",
            normal=normal,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What answers at an address, or does not."""

    name: str
    place: str
    """Zone of its host; where none is named, the host."""
    answers: bool
    last_heard: float | None = None
    """Unix time."""


def cut_links(snapshot: Snapshot) -> Iterator[Finding]:
    """Places of which nothing answers, while something of another place does.

    A machine of its own that is down looks the same from here.
    """
    for place, parts in _cut(snapshot).items():
        times = [part.last_heard for part in parts if part.last_heard is not None]
        yield Finding(
            rule="link_cut",
            sentence=f"The link to {place} is cut, or what stands there is down: nothing of it "
            f"answers ({', '.join(part.name for part in parts)}), and other places do.",
            cure="Mend the network between here and there, or start the machines there again. "
            "Agents go on until admission closes at the staleness bound, the trainer as far as "
            "its samples last; both continue by themselves, and nothing is lost or doubled.",
            since=min(times, default=published(snapshot)),
        )


def services_beyond(snapshot: Snapshot) -> frozenset[str]:
    """Services that a cut link explains, by name in `Snapshot.problems`."""
    cut = _cut(snapshot)
    return frozenset(
        name for name, address in snapshot.addresses.items() if _place(snapshot, address) in cut
    )


def lost_nodes(snapshot: Snapshot) -> Iterator[Finding]:
    """Nodes that neither a cut link nor a process that stands still explains."""
    cut = _cut(snapshot)
    still = {process.name for process in still_processes(snapshot)}
    for node in snapshot.nodes or ():
        if node.state != scheduler_pb.NODE_STATE_LOST or _place_of(snapshot, node) in cut:
            continue
        if f"node_agent-{node.node_id}" in still:
            continue
        yield Finding(
            rule="node_lost",
            sentence=f"Node {node.node_id} is lost; its {node.assignment.tag or 'no'} work waits "
            "for other nodes.",
            cure=f"{_cure(snapshot, node.node_id)}, or remove it permanently with `seamflow drain "
            f"{node.node_id}`.",
            since=heartbeat(node),
        )


def _cure(snapshot: Snapshot, node_id: str) -> str:
    restart = "Restart its node agent (`python -m services.node_agent`)"
    if any(each.node_id == node_id and each.info is not None for each in snapshot.servers):
        return f"Its rollout server answers: mend the link between it and the scheduler. {restart}"
    return restart


def _cut(snapshot: Snapshot) -> dict[str, list[_Part]]:
    """By place the parts of those that are silent altogether; none if no other place answers."""
    found: dict[str, list[_Part]] = defaultdict(list)
    for part in _parts(snapshot):
        found[part.place].append(part)
    silent = {
        place: parts
        for place, parts in found.items()
        if len(parts) >= _FEWEST_PARTS and not any(part.answers for part in parts)
    }
    return silent if any(part.answers for parts in found.values() for part in parts) else {}


def _parts(snapshot: Snapshot) -> Iterator[_Part]:
    for name, address in snapshot.addresses.items():
        is_silent = isinstance(snapshot.problems.get(name), UnavailableError | DeadlineError)
        yield _Part(SERVICES[name].name, _place(snapshot, address), not is_silent)
    for server in snapshot.servers:
        place = _place(snapshot, server.address)
        yield _Part(f"rollout server of {server.node_id}", place, server.info is not None)
    for node in snapshot.nodes or ():
        if node.state == scheduler_pb.NODE_STATE_LOST and (place := _place_of(snapshot, node)):
            yield _Part(f"node {node.node_id}", place, answers=False, last_heard=heartbeat(node))


def _place_of(snapshot: Snapshot, node: scheduler_pb.Node) -> str:
    """Where the workers of a node are; empty: it has none."""
    return next((_place(snapshot, worker.address) for worker in node.workers), "")


def _place(snapshot: Snapshot, address: str) -> str:
    """Of several addresses that of the first."""
    host = address.rpartition("/")[2].partition(",")[0].removeprefix("ipv4:").rpartition(":")[0]
    zone = snapshot.zones.get(host)
    return f"zone {zone!r} ({host})" if zone else host


def no_server_serves(snapshot: Snapshot) -> Iterator[Finding]:
    """Rollouts are running and no server may take their turns."""
    if (
        snapshot.readiness is None
        or not snapshot.readiness.num_running_rollouts
        or snapshot.nodes is None
    ):
        return
    waiting = f"{snapshot.readiness.num_running_rollouts} rollouts wait for a rollout server"
    if not snapshot.servers:
        yield Finding(
            rule="no_rollout_servers",
            sentence=f"{waiting}: no node offers one.",
            cure="Start a node agent whose node has the tag rollout and a rollout worker.",
            since=created(snapshot),
        )
        return
    still = {process.address for process in still_processes(snapshot)}
    if all(server.address in still for server in snapshot.servers):
        return
    serving = [s for s in snapshot.servers if state_of(s) == server_pb.SERVER_STATE_SERVING]
    if not serving:
        yield _none_serves(snapshot, waiting)
    elif not any(is_current(snapshot, server) for server in serving):
        yield _all_are_behind(snapshot, waiting, serving)


def _none_serves(snapshot: Snapshot, waiting: str) -> Finding:
    states = ", ".join(f"{s.node_id} at {s.address} {server_state(s)}" for s in snapshot.servers)
    trains = is_trainer(snapshot, trainer_pb.TRAINER_STATE_TRAINING)
    answering = any(server.info is not None for server in snapshot.servers)
    loads = {server.address for server in snapshot.servers} <= loading_addresses(snapshot)
    if loads:
        cure = "They load the model: their ports are closed until then."
    elif not answering:
        cure = (
            "Their logs, and those of their node agents, say why. An agent restarts a server that "
            "ended; one that stands still must be ended. Or their addresses cannot be reached."
        )
    elif trains:
        cure = "They continue when the step is done and nodes return to rollout."
    else:
        cure = (
            "Their nodes must be assigned to rollout: see `seamflow status` and the node agents' "
            "logs."
        )
    return Finding(
        rule="no_server_serves",
        sentence=f"{waiting}: {states}.",
        cure=cure,
        since=last_event(snapshot, "assigned") if answering else _silent_since(snapshot),
        normal=loads or (trains and answering),
    )


def _silent_since(snapshot: Snapshot) -> float | None:
    """When a node agent last reported another state of a silent server, or, if that is later, when
    the oldest rollout that still runs began; else when nodes were assigned."""
    nodes = {server.node_id for server in snapshot.servers}
    reports = (last_event(snapshot, "reported", node_id) for node_id in nodes)
    known = [time for time in (*reports, created(snapshot)) if time is not None]
    return max(known, default=last_event(snapshot, "assigned"))


def _all_are_behind(snapshot: Snapshot, waiting: str, serving: list[ServerSnapshot]) -> Finding:
    assert snapshot.manifest is not None
    versions = ", ".join(
        f"{server.info.server_id} has v{server.info.weight_version}"
        for server in serving
        if server.info is not None
    )
    return Finding(
        rule="no_current_server",
        sentence=f"{waiting} with allowed weights: the newest committed version is "
        f"v{snapshot.manifest.weight_version}, {versions}.",
        cure="Servers load new weights automatically; if this persists, see their logs. The "
        "gateway allows max_version_lag versions behind "
        f"({GATEWAY_VERSION_LAG} by default).",
        since=published(snapshot),
    )


def ejected_servers(snapshot: Snapshot) -> Iterator[Finding]:
    """Servers to which the gateway sends no turns, as turns failed there."""
    for use in snapshot.server_uses:
        if use.ejection not in (rollout_pb.EJECTION_EJECTED, rollout_pb.EJECTION_PROBED):
            continue
        left = seconds_of(use.ejection_left)
        then = f"for {left:.0f} s more" if left > 0 else "but one turn at a time"
        yield Finding(
            rule="server_ejected",
            sentence=f"The rollout server {use.server_id or '(silent)'} at {use.address} gets no "
            f"turns {then}: {use.ejection_cause}.",
            cure="See its log and restart it; the gateway takes it back once its turns end well.",
        )
