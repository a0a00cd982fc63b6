"""Every cause of waiting is found from a snapshot, with its cure."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from seamflow.common.v1.tokens_pb2 import FAILURE_CLASS_ENVIRONMENT, Failure
from seamflow.errors import NotFoundError, UnavailableError
from seamflow.evaluator.v1 import evaluator_service_pb2 as evaluator_pb
from seamflow.inspect.diagnosis import Finding
from seamflow.inspect.processes import Process, ProcessState
from seamflow.inspect.progress import Progress
from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.inspect.status_screen import status_screen
from seamflow.inspect.why_stuck import why_stuck
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1.sample_service_pb2 import Readiness
from seamflow.trajectory.v1.trajectory_pb2 import Trajectory
from seamflow.weights.v1.weight_service_pb2 import Manifest

NOW = 10_000.0


def trainer(state: str, step: int = 6) -> trainer_pb.GetStatusResponse:
    """A trainer in this state."""
    return trainer_pb.GetStatusResponse(
        state=trainer_pb.TrainerState.Value(f"TRAINER_STATE_{state}"), step=step, num_steps=20
    )


def readiness(
    ready: int = 0, running: int = 2, admissible: int = 1, queued: int = 9, **more: Any
) -> Readiness:
    """Groups; a step takes 4, a running group has 3 rollouts under way."""
    return Readiness(
        num_ready_groups=ready,
        num_running_groups=running,
        num_running_rollouts=3 * running,
        num_admissible_groups=admissible,
        num_queued_tasks=queued,
        groups_per_step=4,
        **more,
    )


def node(
    name: str = "n0", tag: str = "rollout", state: str = "ACTIVE", epoch: int = 3, **more: object
) -> scheduler_pb.Node:
    """A node that can do both, and has taken up its assignment."""
    reported = more.pop("reported_epoch", epoch)
    return scheduler_pb.Node(
        node_id=name,
        capability_tags=["rollout", "train"],
        assignment=scheduler_pb.Assignment(tag=tag, epoch=epoch, lent=tag == "rollout"),
        state=scheduler_pb.NodeState.Value(f"NODE_STATE_{state}"),
        reported_epoch=reported,  # type: ignore[arg-type]
        heartbeat_time=Timestamp(seconds=int(NOW) - 45),
        **more,  # type: ignore[arg-type]
    )


def server(state: str | None = "SERVING", version: int = 6) -> ServerSnapshot:
    """A rollout server; None: it does not answer."""
    info = None
    if state is not None:
        info = server_pb.GetServerInfoResponse(
            server_id="s0",
            state=server_pb.ServerState.Value(f"SERVER_STATE_{state}"),
            weight_version=version,
        )
    return ServerSnapshot(node_id="n0", address="host:1", info=info)


def assigned(name: str, seconds_ago: int, kind: str = "assigned") -> scheduler_pb.AllocationEvent:
    """An entry of the audit log."""
    return scheduler_pb.AllocationEvent(
        kind=kind,
        node=scheduler_pb.Node(node_id=name),
        event_time=Timestamp(seconds=int(NOW) - seconds_ago),
    )


HEALTHY = Snapshot(
    now=NOW,
    run_id="demo",
    addresses={"scheduler": "host:3", "gateway": "host:2", "trajectory_manager": "host:1"},
    readiness=readiness(),
    trainer=trainer("TRAINING"),
    manifest=Manifest(weight_version=6, commit_time=Timestamp(seconds=int(NOW) - 60)),
    weights_answer=True,
    nodes=(node(),),
    servers=(server(),),
    gateway_serves=True,
)


def findings(**changes: object) -> dict[str, Finding]:
    """What is found when the healthy run changes so, by rule."""
    return {f.rule: f for f in why_stuck(dataclasses.replace(HEALTHY, **changes))}  # type: ignore[arg-type]


def test_a_run_at_work_waits_for_nothing() -> None:
    """The healthy run names the step that is computed."""
    assert list(findings()) == ["nothing_waits"]
    assert "computes step 7" in findings()["nothing_waits"].sentence


def test_a_finished_run_waits_for_nothing() -> None:
    """Empty queues and idle nodes mean nothing after the last step."""
    found = findings(trainer=trainer("FINISHED", 20), readiness=readiness(0, 0, 4, 0))
    assert list(found) == ["finished"]


def test_a_service_that_does_not_answer_is_named_with_flag_and_variable() -> None:
    """Its address, how to start it and what sets the address."""
    found = findings(problems={"scheduler": UnavailableError("refused")}, nodes=None, servers=())
    finding = found["service_does_not_answer"]
    assert "scheduler at host:3 does not answer: refused" in finding.sentence
    for part in ("python -m scheduler", "--scheduler", "SEAMFLOW_SCHEDULER"):
        assert part in finding.cure
    assert not finding.normal


def test_a_service_that_loads_its_model_is_not_blamed() -> None:
    """Until the run's first weights are published; others, and a trainer later, are."""
    silent = {name: UnavailableError("refused") for name in ("trainer", "scheduler")}
    start = {"problems": silent, "trainer": None, "nodes": None, "servers": ()}
    loading = findings(**start, manifest=None, weights_answer=True)
    assert "The trainer at ? does not answer yet" in loading["service_loads"].sentence
    assert loading["service_loads"].normal
    assert "scheduler at host:3" in loading["service_does_not_answer"].sentence
    assert "service_loads" not in findings(**start)
    assert "service_loads" not in findings(**start, manifest=None, weights_answer=False)


def test_a_rejected_request_is_not_reported_as_unreachable() -> None:
    """An unknown run is answered, so the cure is another run."""
    problems = {"trajectory_manager": NotFoundError("no run 'demo'")}
    finding = findings(problems=problems, readiness=None)["service_refuses"]
    assert "no run 'demo'" in finding.sentence
    assert "--run" in finding.cure


def test_a_gateway_that_does_not_serve_makes_agents_wait() -> None:
    """Up is not the same as serving."""
    assert "host:2" in findings(gateway_serves=False)["gateway_not_serving"].sentence


def test_a_waiting_trainer_has_group_counts_and_time_since_publish() -> None:
    """Slow groups are normal; the counts show the work in progress."""
    finding = findings(trainer=trainer("WAITING"), readiness=readiness(1))[
        "trainer_waits_for_groups"
    ]
    assert "waits for 4 groups for step 7: 1 ready, 2 running (6 rollouts)" in finding.sentence
    assert (finding.since, finding.normal) == (NOW - 60, True)


def test_alarms_of_the_trainer_are_findings_newest_first() -> None:
    """Three of them, whatever else is found; none is normal."""
    status = trainer("WAITING")
    status.alarms.extend(["w", "x", "y", "group 'g' of step 3 cannot be trained"])
    found = why_stuck(dataclasses.replace(HEALTHY, trainer=status))
    found = [each for each in found if each.rule == "trainer_alarm"]
    assert [each.sentence for each in found] == [
        "The trainer goes on, but group 'g' of step 3 cannot be trained.",
        "The trainer goes on, but y.",
        "The trainer goes on, but x.",
    ]
    assert not any(each.normal for each in found)
    assert "trainer_alarm" not in findings(trainer=trainer("WAITING"))


def test_a_trainer_that_does_not_take_ready_groups_is_noticed() -> None:
    """Enough groups are ready, and still it waits."""
    found = findings(trainer=trainer("WAITING"), readiness=readiness(4))
    assert "trainer_does_not_lease" in found
    assert "trainer_waits_for_groups" not in found


def test_closed_admission_behind_ready_groups_is_normal() -> None:
    """The bound holds agents back until the trainer leases its next step."""
    finding = findings(readiness=readiness(8, 0, 0))["admission_closed"]
    assert "staleness bound" in finding.sentence
    assert finding.normal


def test_closed_admission_while_a_step_is_trained_is_normal() -> None:
    """On-policy nothing may begin before there are new weights."""
    found = findings(trainer=trainer("TRAINING"), readiness=readiness(0, 0, 0))
    assert found["admission_closed"].normal
    assert "store_is_full" not in found


def test_closed_admission_with_nothing_running_or_ready_is_the_cap() -> None:
    """The staleness bound never blocks the next step, so this needs action and comes first."""
    snapshot = dataclasses.replace(
        HEALTHY, trainer=trainer("WAITING"), readiness=readiness(1, 0, 0, num_stored_tokens=12_345)
    )
    first = why_stuck(snapshot)[0]
    assert first.rule == "store_is_full"
    assert "12,345 tokens" in first.sentence
    assert "seamflow export" in first.cure
    assert not first.normal


def test_a_scorer_that_fails_is_named_with_its_error() -> None:
    """And no consumer is looked for, as one runs."""
    failing = readiness(
        1, 0, 0, num_incomplete_groups=3, num_column_failures=7, column_failure="column rm: E: bad"
    )
    found = findings(trainer=trainer("WAITING"), readiness=failing)
    assert "7 times so far: column rm: E: bad." in found["columns_fail"].sentence
    assert not found["columns_fail"].normal
    assert "columns_missing" not in found


@pytest.mark.parametrize("running", [0, 2])
def test_missing_columns_ask_for_their_consumer(running: int) -> None:
    """Complete groups that lack a column are not ready; it passes while others still run."""
    closed = readiness(1, running, 0, num_incomplete_groups=3)
    found = findings(trainer=trainer("WAITING"), readiness=closed)
    assert "store_is_full" not in found
    assert "3 groups" in found["columns_missing"].sentence
    assert found["columns_missing"].normal is (running > 0)
    enough = readiness(4, 0, 0, num_incomplete_groups=3)
    assert "columns_missing" not in findings(readiness=enough)


def test_an_empty_queue_asks_for_the_dataloader() -> None:
    """Admission is open and there is nothing to admit."""
    finding = findings(trainer=trainer("WAITING"), readiness=readiness(0, 0, 4, 0))["no_tasks"]
    assert "services.dataloader" in finding.cure
    assert not finding.normal


def evaluations(state: str, done: int = 0, total: int = 0) -> evaluator_pb.GetEvaluationsResponse:
    """What an evaluator in this state says, after two evaluations."""
    lines = [
        evaluator_pb.Evaluation(step=step, metric="success", mean=mean, low=mean, high=mean)
        for step, mean in ((0, 0.5), (20, 0.25))
    ]
    return evaluator_pb.GetEvaluationsResponse(
        state=evaluator_pb.EvaluatorState.Value(f"EVALUATOR_STATE_{state}"),
        evaluations=lines,
        best=lines[0],
        num_done=done,
        num_rollouts=total,
    )


def test_an_empty_queue_is_right_until_the_first_weights_are_evaluated() -> None:
    """The dataloader waits; control: not beside training."""
    changes = {"trainer": trainer("WAITING", 0), "readiness": readiness(0, 0, 4, 0)}
    found = findings(**changes, evaluations=evaluations("BEFORE_TRAINING", 3, 8))
    assert "3 of 8 rollouts are done" in found["first_evaluation"].sentence
    assert found["first_evaluation"].normal
    assert "no_tasks" not in found
    found = findings(**changes, evaluations=evaluations("BESIDE_TRAINING"))
    assert "no_tasks" in found
    assert "first_evaluation" not in found


def test_the_last_evaluation_of_a_finished_run_is_told() -> None:
    """Until it is over, the run is not."""
    after = evaluations("AFTER_TRAINING", 1, 2)
    assert list(findings(trainer=trainer("FINISHED"), evaluations=after)) == ["last_evaluation"]
    over = evaluations("FINISHED")
    assert list(findings(trainer=trainer("FINISHED"), evaluations=over)) == ["finished"]


def test_status_tells_of_evaluations() -> None:
    """State, newest and best; nothing where the run has none."""
    screen = status_screen(dataclasses.replace(HEALTHY, evaluations=evaluations("BESIDE_TRAINING")))
    assert "evals    beside training; 2 evaluations" in screen
    assert "newest success 0.250 at step 20; best success 0.500 at step 0" in screen
    assert "evals" not in status_screen(HEALTHY)
    lost = dataclasses.replace(HEALTHY, problems={"evaluator": UnavailableError("gone")})
    assert "evals    None does not answer; set by --evaluator" in status_screen(lost)


def test_an_empty_queue_is_fine_while_enough_is_ready() -> None:
    """No action is needed yet."""
    assert findings(readiness=readiness(4, 0, 4, 0))["no_tasks"].normal


def test_unleased_tasks_ask_for_an_agent_runner() -> None:
    """Queue full, admission open, nothing running."""
    finding = findings(readiness=readiness(0, 0, 1, 9))["no_agents"]
    assert "9 tasks wait for an agent" in finding.sentence
    assert "1 group may start" in finding.sentence
    assert "--run-id demo" in finding.cure


@pytest.mark.parametrize(
    ("agents", "awaited", "cure"),
    [
        ("runner", "the agent runner leases none", "runs/a/logs/agent_runner.log"),
        ("program", "agent_command leases none", "runs/a/logs/agent.log"),
        ("environment", "no episode", "environments-*.log"),
        ("outside", "no agent from outside", "POST /rollouts/lease"),
    ],
)
def test_who_is_awaited_is_named(agents: str, awaited: str, cure: str) -> None:
    """By the kind of agent that the run was started with; a new run is not blamed."""
    idle = {"readiness": readiness(0, 0, 1, 9), "agents": agents, "logs": "runs/a/logs"}
    finding = findings(**idle, started=NOW - 3600)["no_agents"]
    assert awaited in finding.sentence
    assert cure in finding.cure
    assert not finding.normal
    new = findings(**idle, started=NOW - 5)["no_agents"]
    assert new.normal
    assert new.cure.startswith("Little time has passed since the start.")


def test_no_agents_finding_while_agents_are_busy() -> None:
    """A full queue with running rollouts is normal."""
    assert "no_agents" not in findings()


def test_rollouts_without_any_server_are_a_problem() -> None:
    """No node offers a rollout worker."""
    oldest = Trajectory(rollout_id="r", create_time=Timestamp(seconds=int(NOW) - 30))
    finding = findings(servers=(), oldest_rollout=oldest)["no_rollout_servers"]
    assert "6 rollouts wait" in finding.sentence
    assert finding.since == NOW - 30


def test_an_ejected_server_is_named_with_its_cause() -> None:
    """Also while it is probed; one that is in use is none of a problem."""
    uses = [
        rollout_pb.ServerUse(
            address=f"h:{i}", server_id=f"s{i}", ejection=state, ejection_cause="log-prob nan"
        )
        for i, state in enumerate(
            (rollout_pb.EJECTION_EJECTED, rollout_pb.EJECTION_NONE, rollout_pb.EJECTION_PROBED)
        )
    ]
    assert "server_ejected" not in findings(server_uses=(uses[1],))
    for use in (uses[0], uses[2]):
        finding = findings(server_uses=(use,))["server_ejected"]
        assert use.address in finding.sentence
        assert "log-prob nan" in finding.sentence
        assert not finding.normal


def test_servers_released_for_training_are_normal() -> None:
    """Colocated: agents wait while the step is computed."""
    assert findings(servers=(server("RELEASED"),))["no_server_serves"].normal


@pytest.mark.parametrize(
    ("state", "expected"),
    [("RELEASED", "is released"), ("PAUSED", "is paused"), (None, "does not answer")],
)
def test_servers_that_do_not_serve_a_waiting_trainer_are_a_problem(
    state: str | None, expected: str
) -> None:
    """The trainer needs their rollouts and they stand still."""
    found = findings(
        trainer=trainer("WAITING"), servers=(server(state),), events=(assigned("n0", 20),)
    )
    assert expected in found["no_server_serves"].sentence
    assert found["no_server_serves"].since == NOW - 20
    assert not found["no_server_serves"].normal


def test_a_crashed_server_is_a_problem_even_while_training() -> None:
    """Silence is not the same as released memory."""
    assert not findings(servers=(server(None),))["no_server_serves"].normal


@pytest.mark.parametrize(
    ("state", "is_normal"),
    [({}, True), ({"is_running": False}, False), ({"is_silent": True}, None)],
)
def test_a_server_that_loads_its_model_is_waited_for(
    state: dict[str, Any], is_normal: bool | None
) -> None:
    """Its process runs and does not listen; one that accepts and is silent is named itself."""
    process = Process(name="rollout_server", address="host:1", pid=1)
    states = (ProcessState(process=process, **state),)
    found = findings(servers=(server(None),), processes=states)
    if is_normal is None:
        assert "no_server_serves" not in found
    else:
        assert found["no_server_serves"].normal is is_normal


def test_a_silent_server_waits_since_its_node_reported_it() -> None:
    """Not since it was assigned; reports of other nodes do not count."""
    events = (assigned("n0", 500), assigned("n0", 20, "reported"), assigned("n1", 5, "reported"))
    finding = findings(servers=(server(None),), events=events)["no_server_serves"]
    assert finding.since == NOW - 20


def test_servers_too_far_behind_get_no_turns() -> None:
    """No traffic before current weights: both versions are named."""
    finding = findings(servers=(server(version=4),))["no_current_server"]
    assert "newest committed version is v6, s0 has v4" in finding.sentence
    assert finding.since == NOW - 60


def test_one_version_behind_still_serves() -> None:
    """The gateway's default lag."""
    assert "no_current_server" not in findings(servers=(server(version=5),))


def test_without_running_rollouts_servers_are_ignored() -> None:
    """Nothing waits for them."""
    assert "no_rollout_servers" not in findings(readiness=readiness(4, 0), servers=())


def test_a_lost_node_is_reported_since_its_last_heartbeat() -> None:
    """With the work that moves, and both ways out."""
    finding = findings(nodes=(node(), node("n1", state="LOST")))["node_lost"]
    assert "n1" in finding.sentence
    assert "seamflow drain n1" in finding.cure
    assert finding.since == NOW - 45


def test_a_suspended_trainer_with_enough_groups_waits_for_its_nodes() -> None:
    """Its nodes are lent and were not taken back."""
    found = findings(
        trainer=trainer("SUSPENDED"), readiness=readiness(4), events=(assigned("n0", 15),)
    )
    finding = found["trainer_waits_for_nodes"]
    assert "n0 does rollout (lent)" in finding.sentence
    assert finding.since == NOW - 15


@pytest.mark.parametrize(
    ("nodes", "cure"),
    [
        ((), "No node has the tag train"),
        ((node(state="LOST"),), "lost or draining"),
        ((node(draining=True),), "lost or draining"),
        ((node(),), "takes lent nodes back within one switch"),
    ],
)
def test_why_a_gang_is_not_placed(nodes: tuple[scheduler_pb.Node, ...], cure: str) -> None:
    """No such node, none usable, or just not yet."""
    found = findings(trainer=trainer("SUSPENDED"), readiness=readiness(4), nodes=nodes)
    assert cure in found["trainer_waits_for_nodes"].cure


def test_a_suspended_trainer_without_enough_groups_waits_for_groups() -> None:
    """Lending is how it should be; what stops the groups is what matters."""
    found = findings(trainer=trainer("SUSPENDED"), readiness=readiness(1))
    assert found["trainer_waits_for_groups"].normal
    assert "trainer_waits_for_nodes" not in found


def test_a_switching_node_is_reported_with_both_epochs() -> None:
    """Assigned to training, still winding rollout up."""
    found = findings(
        trainer=trainer("SUSPENDED"),
        readiness=readiness(4),
        nodes=(node(tag="train", state="DRAINING", reported_epoch=2),),
        events=(assigned("n0", 50), assigned("n0", 4), assigned("n1", 1)),
    )
    assert "is assigned to train (epoch 3) but is still draining" in found["node_switches"].sentence
    assert found["node_switches"].since == NOW - 4
    assert "trainer_waits_for_nodes" not in found


def test_a_straggler_is_named_after_ten_minutes() -> None:
    """With the command that shows what it does."""
    old = Trajectory(rollout_id="r7", group_id="g", create_time=Timestamp(seconds=int(NOW) - 601))
    young = Trajectory(rollout_id="r8", create_time=Timestamp(seconds=int(NOW) - 599))
    assert "seamflow tail r7" in findings(oldest_rollout=old)["slow_rollout"].cure
    assert "slow_rollout" not in findings(oldest_rollout=young)


def test_a_drained_node_is_reported_with_its_undo() -> None:
    """An operator's action is not a problem."""
    found = findings(nodes=(node(draining=True),), events=(assigned("n0", 9, "drained"),))
    assert "seamflow drain n0 --undo" in found["node_drained"].cure
    assert found["node_drained"].since == NOW - 9


def test_problems_come_first() -> None:
    """Problems come before normal findings."""
    snapshot = dataclasses.replace(
        HEALTHY, trainer=trainer("WAITING"), nodes=(node("n1", state="LOST"),)
    )
    assert [f.normal for f in why_stuck(snapshot)] == [False, True]


def test_unreachable_services_are_the_only_findings() -> None:
    """Nothing is concluded from what was not answered."""
    silent = {"trainer": UnavailableError("refused"), "weights": UnavailableError("refused")}
    found = why_stuck(Snapshot(now=NOW, problems=silent))
    assert {f.rule for f in found} == {"service_does_not_answer"}
    assert len(found) == 2


def failed_rollout(name: str, message: str) -> Trajectory:
    """One that an environment failed."""
    failure = Failure(failure_class=FAILURE_CLASS_ENVIRONMENT, message=message)
    return Trajectory(rollout_id=name, group_id=name[:2], failure=failure)


def test_failed_rollouts_are_named_with_their_cause() -> None:
    """One finding for each cause, with task, rollout and place; urgent if hardly any finish."""
    failed = (
        failed_rollout("t1/0/1", "step 0 of task 't1' raised KeyError('x') at env.py:7"),
        failed_rollout("t2/0/1", "step 2 of task 't2' raised KeyError('x') at env.py:7"),
    )
    finding = findings(failed_rollouts=failed)["rollouts_fail"]
    assert finding.sentence == (
        "2 rollouts failed and were not scored, 0 finished; last failure ENVIRONMENT of rollout "
        "t2/0/1: step 2 of task 't2' raised KeyError('x') at env.py:7."
    )
    assert "seamflow tail t2/0/1" in finding.cure
    assert not finding.normal
    assert findings(failed_rollouts=failed, num_finished=3)["rollouts_fail"].normal
    assert "rollouts_fail" not in findings(num_finished=3)


def test_a_run_that_does_not_learn_is_a_finding_and_on_the_screen() -> None:
    """With its cure; the causes of failing rollouts are not told twice."""
    steps = [{"step": i, "reward_mean": 0.0, "reward_std": 0.0} for i in range(3)]
    found = findings(progress=Progress(steps=steps, num_failed=9, num_tried=9))
    assert "check the reward function" in found["rewards_equal"].cure
    assert "tasks_fail" in found
    snapshot = dataclasses.replace(HEALTHY, progress=Progress(steps=steps))
    assert "health   ! All rewards of the last 3 steps are 0.000" in status_screen(snapshot)
    assert "health" not in status_screen(HEALTHY)
