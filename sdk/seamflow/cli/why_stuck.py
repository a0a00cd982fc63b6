"""Who waits for what, since when, and the cure: rules over the facts, in the order of cause.

Each rule is a function from facts to findings; `why_stuck` asks all of them. A finding that is
`normal` describes work under way; the others want somebody to act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from seamflow.cli.diagnosis import (
    GATEWAY_VERSION_LAG,
    Finding,
    activity,
    counts,
    created,
    groups,
    has_enough,
    heartbeat,
    is_current,
    is_trainer,
    last_event,
    node_state,
    published,
    server_state,
    state_of,
)
from seamflow.cli.endpoints import SERVICES
from seamflow.cli.snapshot import Facts, ServerFacts
from seamflow.errors import DeadlineError, UnavailableError
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

__all__ = ["why_stuck"]

_SLOW_ROLLOUT_SECONDS = 600.0


def why_stuck(facts: Facts) -> list[Finding]:
    """Everything that waits, causes first; never empty."""
    if is_trainer(facts, trainer_pb.TRAINER_STATE_FINISHED):
        return [_nothing_waits(facts)]
    findings = [finding for rule in _RULES for finding in rule(facts)]
    findings.sort(key=lambda finding: finding.normal)
    return findings or [_nothing_waits(facts)]


def _unanswered(facts: Facts) -> Iterator[Finding]:
    for name, error in facts.problems.items():
        service, address = SERVICES[name], facts.addresses.get(name, "?")
        if isinstance(error, UnavailableError | DeadlineError):
            yield Finding(
                rule="service_does_not_answer",
                sentence=f"The {service.name} at {address} does not answer: {error}.",
                cure=f"Start it with `python -m {service.module}`, or name its address with "
                f"{service.flag} or {service.variable}.",
            )
        else:
            yield Finding(
                rule="service_refuses",
                sentence=f"The {service.name} at {address} does not tell: {error}.",
                cure="Check --run, and SEAMFLOW_TOKEN where the services ask for a token.",
            )
    if facts.gateway_serves is False:
        yield Finding(
            rule="gateway_not_serving",
            sentence=f"Agents wait for the gateway at {facts.addresses.get('gateway', '?')}: "
            "it runs but does not serve.",
            cure="It is starting or draining; its log says what it waits for.",
        )


def _lost_nodes(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes or ():
        if node.state == scheduler_pb.NODE_STATE_LOST:
            does = node.assignment.tag or "no"
            yield Finding(
                rule="node_lost",
                sentence=f"Node {node.node_id} is lost; its {does} work waits for other nodes.",
                cure=f"Start its node agent again (`python -m services.node_agent`), or take it "
                f"out for good with `seamflow drain {node.node_id}`.",
                since=heartbeat(node),
            )


def _late_switches(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes or ():
        is_lost = node.state == scheduler_pb.NODE_STATE_LOST
        if is_lost or node.reported_epoch >= node.assignment.epoch:
            continue
        wanted, state = node.assignment.tag or "nothing", node_state(node)
        yield Finding(
            rule="node_switches",
            sentence=f"Node {node.node_id} shall do {wanted} (epoch {node.assignment.epoch}) but "
            f"is still {state} at epoch {node.reported_epoch}.",
            cure="A switch takes as long as its device state takes to move; if this lasts, the "
            "log of its node agent says what it waits for.",
            since=last_event(facts, "assigned", node.node_id),
            normal=True,
        )


def _trainer_waits_for_nodes(facts: Facts) -> Iterator[Finding]:
    """Enough samples are ready, and no node is assigned to the gang."""
    if not is_trainer(facts, trainer_pb.TRAINER_STATE_SUSPENDED) or not has_enough(facts):
        return
    able = [node for node in facts.nodes or () if "train" in node.capability_tags]
    if any(node.assignment.tag == "train" for node in able):
        return  # `_late_switches` tells about these
    usable = [n for n in able if not n.draining and n.state != scheduler_pb.NODE_STATE_LOST]
    doing = ", ".join(f"{node.node_id} does {activity(node)}" for node in able)
    sentence = "The trainer is suspended and waits for its nodes, though enough groups are ready"
    if not able:
        cure = "No node has the tag train: start a node agent with it."
    elif not usable:
        cure = "Every node that can train is lost or draining: bring one back, or undo its drain."
    else:
        cure = (
            "The scheduler takes lent nodes back by itself within one switch; if this lasts, "
            "check that the gang asks for no more nodes than can train."
        )
    yield Finding(
        rule="trainer_waits_for_nodes",
        sentence=f"{sentence}{f': {doing}' if doing else ''}.",
        cure=cure,
        since=last_event(facts, "assigned"),
    )


def _trainer_waits_for_groups(facts: Facts) -> Iterator[Finding]:
    """The trainer has too few groups; the rules below say why they do not come."""
    waits = is_trainer(facts, trainer_pb.TRAINER_STATE_WAITING, trainer_pb.TRAINER_STATE_SUSPENDED)
    if facts.readiness is None or facts.trainer is None or not waits:
        return
    have, step = counts(facts.readiness), facts.trainer.step + 1
    if has_enough(facts):
        if is_trainer(facts, trainer_pb.TRAINER_STATE_WAITING):
            yield Finding(
                rule="trainer_does_not_lease",
                sentence=f"The trainer waits for step {step} though enough groups are ready: "
                f"{have}.",
                cure="It leases them within moments; if this lasts, its log says why the lease "
                "is refused, such as an older trainer's epoch.",
                since=published(facts),
                normal=True,
            )
        return
    yield Finding(
        rule="trainer_waits_for_groups",
        sentence=f"The trainer waits for {facts.readiness.groups_per_step} groups for step "
        f"{step}: {have}.",
        cure="Groups come as agents finish rollouts; whatever stops them is listed here.",
        since=published(facts),
        normal=True,
    )


def _admission_is_closed(facts: Facts) -> Iterator[Finding]:
    ready = facts.readiness
    if ready is None or ready.num_admissible_groups > 0:
        return
    waits = is_trainer(facts, trainer_pb.TRAINER_STATE_WAITING)
    if not waits or has_enough(facts) or ready.num_running_groups or ready.num_incomplete_groups:
        yield Finding(
            rule="admission_closed",
            sentence=f"Agents wait for admission: it is closed at the staleness bound with "
            f"{ready.num_admitted_groups} groups admitted, {ready.num_discarded_groups} discarded "
            f"and step {ready.leased_step} leased.",
            cure="It opens as soon as the trainer leases its next step, or waits for it.",
            since=published(facts),
            normal=True,
        )
    else:
        # Fewer groups than a step takes are admitted, so it is not the staleness bound.
        yield Finding(
            rule="store_is_full",
            sentence=f"Agents wait for admission: the run stores {ready.num_stored_tokens:,} "
            "tokens, more than its max_stored_tokens, and no group is running that could become "
            "ready.",
            cure="Write trained rollouts to files and delete them: `seamflow export --out FOLDER "
            "--delete`. A run with retention_steps deletes them by itself.",
            since=published(facts),
        )


def _columns_are_missing(facts: Facts) -> Iterator[Finding]:
    """Complete groups wait for a consumer other than the trainer."""
    ready = facts.readiness
    if ready is None or not ready.num_incomplete_groups or has_enough(facts):
        return
    yield Finding(
        rule="columns_missing",
        sentence=f"The trainer waits for columns: {groups(ready.num_incomplete_groups)} complete "
        "but for a required column.",
        cure="Do the consumers that write the run's required_columns run? "
        "ColumnService.ListSampleStatus tells which column each sample lacks.",
        since=published(facts),
        normal=bool(ready.num_running_groups),
    )


def _nobody_submits(facts: Facts) -> Iterator[Finding]:
    ready = facts.readiness
    if ready is None or ready.num_admissible_groups == 0 or ready.num_queued_tasks:
        return
    yield Finding(
        rule="no_tasks",
        sentence="Agents wait for tasks: the task queue is empty though admission would let "
        f"{groups(ready.num_admissible_groups)} start.",
        cure="Has the dataloader ended? Start it again (`python -m services.dataloader`); "
        "its log says whether its tasks are used up.",
        since=created(facts) if ready.num_running_groups else published(facts),
        normal=has_enough(facts),
    )


def _nobody_leases(facts: Facts) -> Iterator[Finding]:
    ready = facts.readiness
    if ready is None or not ready.num_queued_tasks or not ready.num_admissible_groups:
        return
    if ready.num_running_rollouts:
        return  # agents are at work; they lease more as they finish
    yield Finding(
        rule="no_agents",
        sentence=f"{ready.num_queued_tasks} tasks wait for an agent: no agent runner leases them "
        f"though {groups(ready.num_admissible_groups)} may start.",
        cure="Start one with `python -m seamflow.runner --agent package.module:Class --run-id "
        f"{facts.run_id}`; if one runs, its log says why it cannot reach the trajectory manager.",
        since=published(facts),
    )


def _no_server_serves(facts: Facts) -> Iterator[Finding]:
    """Rollouts are under way and no server may take their turns."""
    if facts.readiness is None or not facts.readiness.num_running_rollouts or facts.nodes is None:
        return
    waiting = f"{facts.readiness.num_running_rollouts} rollouts wait for a rollout server"
    if not facts.servers:
        yield Finding(
            rule="no_rollout_servers",
            sentence=f"{waiting}: no node offers one.",
            cure="Start a node agent whose node has the tag rollout and a rollout worker.",
            since=created(facts),
        )
        return
    serving = [s for s in facts.servers if state_of(s) == server_pb.SERVER_STATE_SERVING]
    if not serving:
        yield _none_serves(facts, waiting)
    elif not any(is_current(facts, server) for server in serving):
        yield _all_are_behind(facts, waiting, serving)


def _none_serves(facts: Facts, waiting: str) -> Finding:
    states = ", ".join(f"{s.node_id} at {s.address} {server_state(s)}" for s in facts.servers)
    trains = is_trainer(facts, trainer_pb.TRAINER_STATE_TRAINING)
    answering = any(server.info is not None for server in facts.servers)
    if not answering:
        cure = (
            "Start them again (`python -m rollout.server`), or check that their addresses can be "
            "reached from here."
        )
    elif trains:
        cure = "They go on by themselves when the step is done and nodes return to rollout."
    else:
        cure = (
            "Their nodes must be assigned to rollout: see `seamflow status` and the node agents' "
            "logs."
        )
    return Finding(
        rule="no_server_serves",
        sentence=f"{waiting}: {states}.",
        cure=cure,
        since=last_event(facts, "assigned"),
        normal=trains and answering,
    )


def _all_are_behind(facts: Facts, waiting: str, serving: list[ServerFacts]) -> Finding:
    assert facts.manifest is not None
    versions = ", ".join(
        f"{server.info.server_id} has v{server.info.weight_version}"
        for server in serving
        if server.info is not None
    )
    return Finding(
        rule="no_current_server",
        sentence=f"{waiting} with allowed weights: the newest committed version is "
        f"v{facts.manifest.weight_version}, {versions}.",
        cure="Servers load new weights by themselves; if this lasts, their logs say why they "
        "cannot. The gateway allows max_version_lag versions behind "
        f"({GATEWAY_VERSION_LAG} by default).",
        since=published(facts),
    )


def _slow_rollout(facts: Facts) -> Iterator[Finding]:
    began = created(facts)
    if began is None or facts.oldest_rollout is None:
        return
    if facts.now - began < _SLOW_ROLLOUT_SECONDS:
        return
    rollout_id = facts.oldest_rollout.rollout_id
    yield Finding(
        rule="slow_rollout",
        sentence=f"Group {facts.oldest_rollout.group_id or '(none)'} waits for rollout "
        f"{rollout_id}, the oldest one running.",
        cure=f"Watch it with `seamflow tail {rollout_id}`; the runner's --rollout-timeout bounds "
        "a rollout, which is then replaced.",
        since=began,
        normal=True,
    )


def _drained_nodes(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes or ():
        if node.draining and node.state != scheduler_pb.NODE_STATE_LOST:
            yield Finding(
                rule="node_drained",
                sentence=f"Node {node.node_id} gets no work: it was drained.",
                cure=f"Undo it with `seamflow drain {node.node_id} --undo`.",
                since=last_event(facts, "drained", node.node_id),
                normal=True,
            )


_RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _unanswered,
    _lost_nodes,
    _trainer_waits_for_nodes,
    _no_server_serves,
    _nobody_leases,
    _nobody_submits,
    _admission_is_closed,
    _columns_are_missing,
    _trainer_waits_for_groups,
    _late_switches,
    _slow_rollout,
    _drained_nodes,
)


def _nothing_waits(facts: Facts) -> Finding:
    trainer = facts.trainer
    if trainer is not None and trainer.state == trainer_pb.TRAINER_STATE_FINISHED:
        sentence = f"The run is finished: step {trainer.step} of {trainer.num_steps}."
        return Finding(rule="finished", sentence=sentence, cure="Nothing to do.", normal=True)
    doing = "is at work" if trainer is None else f"computes step {trainer.step + 1}"
    sentence = f"Nothing waits: the trainer {doing}."
    return Finding(rule="nothing_waits", sentence=sentence, cure="Nothing to do.", normal=True)
