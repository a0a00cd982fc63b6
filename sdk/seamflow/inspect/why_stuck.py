"""Who waits for what, since when, and the cure: rules over the snapshot, in the order of cause.

Each rule is a function from snapshot to findings; `why_stuck` asks all of them. A finding that is
`normal` describes work in progress; the others require action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from seamflow.inspect.diagnosis import (
    Finding,
    activity,
    counts,
    created,
    groups,
    has_enough,
    is_trainer,
    last_event,
    node_state,
    published,
)
from seamflow.inspect.findings import (
    cut_links,
    ejected_servers,
    failed_rollouts,
    first_evaluation,
    last_evaluation,
    lost_nodes,
    no_agents,
    no_server_serves,
    waits_for_evaluation,
)
from seamflow.inspect.learning import not_learning
from seamflow.inspect.process_findings import (
    full_disk,
    gateway_not_serving,
    processes_stand_still,
    processes_wait,
    unreachable_services,
)
from seamflow.inspect.snapshot import Snapshot
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

_SLOW_ROLLOUT_SECONDS = 600.0
_ALARMS = 3


def why_stuck(snapshot: Snapshot) -> list[Finding]:
    """All findings, causes first; never empty."""
    if is_trainer(snapshot, trainer_pb.TRAINER_STATE_FINISHED):
        rules: _Rules = (*_PROCESSES, last_evaluation)
    else:
        rules = (*_PROCESSES, *_FAILURES, *_WAITS)
    findings = [finding for rule in rules for finding in rule(snapshot)]
    findings.sort(key=lambda finding: finding.normal)
    return findings or [_nothing_waits(snapshot)]


def standing_still(snapshot: Snapshot) -> list[Finding]:
    """Processes and leases that need somebody, causes first; may be empty."""
    is_finished = is_trainer(snapshot, trainer_pb.TRAINER_STATE_FINISHED)
    rules = _PROCESSES if is_finished else (*_PROCESSES, no_agents)
    return [finding for rule in rules for finding in rule(snapshot) if not finding.normal]


def waiting(snapshot: Snapshot) -> list[Finding]:
    """Further waits that require action if they last; may be empty."""
    if is_trainer(snapshot, trainer_pb.TRAINER_STATE_FINISHED):
        return []
    return [finding for rule in _WAITS for finding in rule(snapshot) if not finding.normal]


def _late_switches(snapshot: Snapshot) -> Iterator[Finding]:
    for node in snapshot.nodes or ():
        is_lost = node.state == scheduler_pb.NODE_STATE_LOST
        if is_lost or node.reported_epoch >= node.assignment.epoch:
            continue
        assigned, state = node.assignment.tag or "nothing", node_state(node)
        yield Finding(
            rule="node_switches",
            sentence=f"Node {node.node_id} is assigned to {assigned} (epoch "
            f"{node.assignment.epoch}) but is still {state} at epoch {node.reported_epoch}.",
            cure="A switch takes as long as moving its device state; if this persists, see the "
            "log of its node agent: worker_call_failed says why a worker does not release it.",
            since=last_event(snapshot, "assigned", node.node_id),
            normal=True,
        )


def _not_learning(snapshot: Snapshot) -> Iterator[Finding]:
    """What speaks against learning; each cause of failing rollouts has a finding of its own."""
    found = [] if snapshot.progress is None else not_learning(snapshot.progress)
    return (each for each in found if each.rule != "tasks_fail" or not snapshot.failed_rollouts)


def _trainer_alarms(snapshot: Snapshot) -> Iterator[Finding]:
    """The newest of what its trainer went on after."""
    for alarm in reversed([] if snapshot.trainer is None else snapshot.trainer.alarms[-_ALARMS:]):
        yield Finding(
            rule="trainer_alarm",
            sentence=f"The trainer goes on, but {alarm}.",
            cure="`seamflow dead-letters` lists the groups that it could not train; for the rest "
            "see its log.",
        )


def _trainer_waits_for_nodes(snapshot: Snapshot) -> Iterator[Finding]:
    """Enough samples are ready, and no node is assigned to the gang."""
    if not is_trainer(snapshot, trainer_pb.TRAINER_STATE_SUSPENDED) or not has_enough(snapshot):
        return
    if snapshot.nodes is None:
        return  # the scheduler does not answer
    able = [node for node in snapshot.nodes if "train" in node.capability_tags]
    if any(node.assignment.tag == "train" for node in able):
        return  # covered by `_late_switches`
    usable = [n for n in able if not n.draining and n.state != scheduler_pb.NODE_STATE_LOST]
    doing = ", ".join(f"{node.node_id} does {activity(node)}" for node in able)
    sentence = "The trainer is suspended and waits for its nodes, though enough groups are ready"
    if not able:
        cure = "No node has the tag train: start a node agent with it."
    elif not usable:
        cure = "Every node that can train is lost or draining: bring one back, or undo its drain."
    else:
        cure = (
            "The scheduler takes lent nodes back within one switch; if this persists, check that "
            "the gang requests no more nodes than can train."
        )
    yield Finding(
        rule="trainer_waits_for_nodes",
        sentence=f"{sentence}{f': {doing}' if doing else ''}.",
        cure=cure,
        since=last_event(snapshot, "assigned"),
    )


def _trainer_waits_for_groups(snapshot: Snapshot) -> Iterator[Finding]:
    """The trainer has too few groups; other rules find the cause."""
    waits = is_trainer(
        snapshot, trainer_pb.TRAINER_STATE_WAITING, trainer_pb.TRAINER_STATE_SUSPENDED
    )
    if snapshot.readiness is None or snapshot.trainer is None or not waits:
        return
    have, step = counts(snapshot.readiness), snapshot.trainer.step + 1
    if has_enough(snapshot):
        if is_trainer(snapshot, trainer_pb.TRAINER_STATE_WAITING):
            yield Finding(
                rule="trainer_does_not_lease",
                sentence=f"The trainer waits for step {step} though enough groups are ready: "
                f"{have}.",
                cure="It leases them within moments; if this persists, see its log for why the "
                "lease fails, such as a stale epoch.",
                since=published(snapshot),
                normal=True,
            )
        return
    yield Finding(
        rule="trainer_waits_for_groups",
        sentence=f"The trainer waits for {snapshot.readiness.groups_per_step} groups for step "
        f"{step}: {have}.",
        cure="Groups complete as agents finish rollouts; anything that blocks them is listed here.",
        since=published(snapshot),
        normal=True,
    )


def _admission_is_closed(snapshot: Snapshot) -> Iterator[Finding]:
    ready = snapshot.readiness
    if ready is None or ready.num_admissible_groups > 0:
        return
    waits = is_trainer(snapshot, trainer_pb.TRAINER_STATE_WAITING)
    if not waits or has_enough(snapshot) or ready.num_running_groups or ready.num_incomplete_groups:
        yield Finding(
            rule="admission_closed",
            sentence=f"Agents wait for admission: it is closed at the staleness bound with "
            f"{ready.num_admitted_groups} groups admitted, {ready.num_discarded_groups} discarded "
            f"and step {ready.leased_step} leased.",
            cure="It opens as soon as the trainer leases its next step, or waits for it.",
            since=published(snapshot),
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
            "--delete`. A run with retention_steps deletes them automatically.",
            since=published(snapshot),
        )


def _columns_fail(snapshot: Snapshot) -> Iterator[Finding]:
    ready = snapshot.readiness
    if ready is None or not ready.column_failure:
        return
    yield Finding(
        rule="columns_fail",
        sentence=f"A scoring service fails on samples, {ready.num_column_failures} times so far: "
        f"{ready.column_failure}.",
        cure="Mend its scorer, or what the scorer calls. A sample on which it fails three times is "
        "replaced like that of a failed rollout; while what the scorer calls is away, it tries "
        "again and again. `seamflow dead-letters` lists tasks that were given up.",
        since=published(snapshot),
    )


def _columns_are_missing(snapshot: Snapshot) -> Iterator[Finding]:
    ready = snapshot.readiness
    if ready is None or not ready.num_incomplete_groups or has_enough(snapshot):
        return
    if ready.column_failure:
        return  # its consumer runs, and fails
    yield Finding(
        rule="columns_missing",
        sentence=f"The trainer waits for columns: {groups(ready.num_incomplete_groups)} complete "
        "but for a required column.",
        cure="Do the consumers that write the run's required_columns run? "
        "ColumnService.ListSampleStatus lists the columns that each sample lacks.",
        since=published(snapshot),
        normal=bool(ready.num_running_groups),
    )


def _no_tasks(snapshot: Snapshot) -> Iterator[Finding]:
    ready = snapshot.readiness
    if ready is None or ready.num_admissible_groups == 0 or ready.num_queued_tasks:
        return
    if waits_for_evaluation(snapshot):
        return  # `first_evaluation` says so
    yield Finding(
        rule="no_tasks",
        sentence="Agents wait for tasks: the task queue is empty though admission would let "
        f"{groups(ready.num_admissible_groups)} start.",
        cure="Has the dataloader ended, as all tasks are used up? dataloader.epochs = 0 repeats "
        "them (`seamflow train … --resume --set dataloader.epochs=0`). Otherwise start it again "
        "(`python -m services.dataloader`); its log says why it ended.",
        since=created(snapshot) if ready.num_running_groups else published(snapshot),
        normal=has_enough(snapshot) or not _should_submit(snapshot),
    )


def _should_submit(snapshot: Snapshot) -> bool:
    """Whether tasks should come: a launcher starts the dataloader, if there is one, as the last."""
    here = {each.process.name: each for each in snapshot.processes if each.process.pid}
    loader = here.get("dataloader")
    return not here or (loader is not None and (loader.answers or not loader.is_running))


def _slow_rollout(snapshot: Snapshot) -> Iterator[Finding]:
    began = created(snapshot)
    if began is None or snapshot.oldest_rollout is None:
        return
    if snapshot.now - began < _SLOW_ROLLOUT_SECONDS:
        return
    rollout_id = snapshot.oldest_rollout.rollout_id
    yield Finding(
        rule="slow_rollout",
        sentence=f"Group {snapshot.oldest_rollout.group_id or '(none)'} waits for rollout "
        f"{rollout_id}, the oldest one running.",
        cure=f"Watch it with `seamflow tail {rollout_id}`; the runner's --rollout-timeout bounds "
        "a rollout, which is then replaced.",
        since=began,
        normal=True,
    )


def _drained_nodes(snapshot: Snapshot) -> Iterator[Finding]:
    for node in snapshot.nodes or ():
        if node.draining and node.state != scheduler_pb.NODE_STATE_LOST:
            yield Finding(
                rule="node_drained",
                sentence=f"Node {node.node_id} gets no work: it was drained.",
                cure=f"Undo it with `seamflow drain {node.node_id} --undo`.",
                since=last_event(snapshot, "drained", node.node_id),
                normal=True,
            )


_Rules = tuple[Callable[[Snapshot], Iterator[Finding]], ...]
_PROCESSES: _Rules = (
    full_disk,
    processes_stand_still,
    cut_links,
    unreachable_services,
    gateway_not_serving,
    lost_nodes,
    processes_wait,
)
_FAILURES: _Rules = (failed_rollouts, _not_learning, _trainer_alarms)
_WAITS: _Rules = (
    _trainer_waits_for_nodes,
    no_server_serves,
    ejected_servers,
    no_agents,
    first_evaluation,
    _no_tasks,
    _admission_is_closed,
    _columns_fail,
    _columns_are_missing,
    _trainer_waits_for_groups,
    _late_switches,
    _slow_rollout,
    _drained_nodes,
)


def _nothing_waits(snapshot: Snapshot) -> Finding:
    trainer = snapshot.trainer
    if trainer is not None and trainer.state == trainer_pb.TRAINER_STATE_FINISHED:
        sentence = f"The run is finished: step {trainer.step} of {trainer.num_steps}."
        return Finding(rule="finished", sentence=sentence, cure="Nothing to do.", normal=True)
    doing = "is at work" if trainer is None else f"computes step {trainer.step + 1}"
    sentence = f"Nothing waits: the trainer {doing}."
    return Finding(rule="nothing_waits", sentence=sentence, cure="Nothing to do.", normal=True)
