"""What is seen of the processes of a run, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from seamflow.common.v1 import process_service_pb2 as pb
from seamflow.durations import to_duration
from seamflow.errors import UnavailableError
from seamflow.inspect.endpoints import Endpoints
from seamflow.inspect.processes import Process, ProcessState, known_processes, write_processes
from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.inspect.why_stuck import standing_still, waiting, why_stuck
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

MANAGER = Process(name="trajectory_manager", address="127.0.0.1:1", pid=11)
GATEWAY = Process(name="rollout_gateway", address="127.0.0.1:2", pid=12)
REDIS = Process(name="redis", pid=13)
DATALOADER = Process(name="dataloader", address="127.0.0.1:3", pid=14)
FULL = "the store (Redis): the store is full"
GONE = "the store (Redis): the store does not answer"
CALL = "/seamflow.trajectory.v1.TrajectoryService/AppendTokens of 127.0.0.1:1: no answer"


def wait(reason: str, cure: str = "") -> pb.Wait:
    return pb.Wait(reason=reason, cure=cure, duration=to_duration(5))


def rules(*states: ProcessState, **others: object) -> list[tuple[str, str]]:
    """Rule and subject of each finding that requires action."""
    snapshot = Snapshot(processes=states, **others)  # type: ignore[arg-type]
    return [(each.rule, each.subject) for each in standing_still(snapshot)]


def test_a_stopped_process_is_named_with_what_lets_it_go_on() -> None:
    """Also where a process that it started stands still; control: one that runs is not named."""
    state = ProcessState(process=MANAGER, stopped=(11, 21))
    (finding,) = standing_still(Snapshot(processes=(state, ProcessState(process=GATEWAY))))
    assert "trajectory_manager (process 11)" in finding.sentence
    assert "kill -CONT 11 21" in finding.cure
    assert rules(ProcessState(process=MANAGER, answers=True)) == []


def test_who_waits_for_one_that_stands_still_is_not_named_beside_it() -> None:
    """A process that loads its model is such a cause too. Control: the manager answers."""
    waits = ProcessState(process=GATEWAY, answers=True, waits=(wait(CALL),))
    silent = ProcessState(process=MANAGER, is_silent=True)
    assert rules(silent, waits) == [("process_silent", "trajectory_manager")]
    assert rules(ProcessState(process=MANAGER), waits) == []
    manager = ProcessState(process=MANAGER, answers=True)
    assert rules(manager, waits) == [("process_waits", f"rollout_gateway: {CALL}")]


@pytest.mark.parametrize(("reason", "named"), [(GONE, ["redis"]), (FULL, ["redis", "manager"])])
def test_a_silent_store_is_named_once_and_a_refusal_stays(reason: str, named: list[str]) -> None:
    """A store that stands still explains that it does not answer, not that it was full."""
    redis = ProcessState(process=REDIS, stopped=(13,))
    manager = ProcessState(process=MANAGER, answers=True, waits=(wait(reason, "Raise it."),))
    found = [subject for _, subject in rules(redis, manager)]
    assert found == ["redis", f"trajectory_manager: {reason}"][: len(named)]
    assert rules(manager) == [("process_waits", f"trajectory_manager: {reason}")]


def test_a_service_that_its_launcher_starts_is_no_alarm() -> None:
    """Before its start and while it loads; control: without a launcher it is one."""
    problems = {"gateway": UnavailableError("refused"), "trainer": UnavailableError("refused")}
    addresses = {"gateway": GATEWAY.address, "trainer": "127.0.0.1:9"}
    loads = ProcessState(process=GATEWAY)
    assert rules(loads, problems=problems, addresses=addresses) == []
    ended = ProcessState(process=GATEWAY, is_running=False)
    found = rules(ended, problems=problems, addresses=addresses)
    assert found == [("service_does_not_answer", name) for name in problems]
    assert rules(problems=problems, addresses=addresses) == found


def test_a_full_disk_is_named_first() -> None:
    """Control: with space nothing is said."""
    assert rules(free_bytes=1 << 19) == [("disk_full", "")]
    assert rules(free_bytes=1 << 21) == []


def test_processes_stay_named_once_training_is_over() -> None:
    """An evaluator that stands still holds the end of a run up."""
    finished = trainer_pb.GetStatusResponse(state=trainer_pb.TRAINER_STATE_FINISHED)
    evaluator = ProcessState(process=Process(name="evaluator", pid=15), stopped=(15,))
    assert rules(evaluator, trainer=finished) == [("process_stopped", "evaluator")]
    snapshot = Snapshot(processes=(evaluator,), trainer=finished)
    assert why_stuck(snapshot)[0].rule == "process_stopped"


def test_an_empty_queue_is_no_alarm_before_the_dataloader_has_come() -> None:
    """The launcher starts it last; control: once it answers, or has ended, tasks should come."""
    ready = sample_pb.Readiness(num_admissible_groups=2, groups_per_step=4)

    def found(*states: ProcessState) -> list[str]:
        return [each.rule for each in waiting(Snapshot(processes=states, readiness=ready))]

    manager = ProcessState(process=MANAGER, answers=True)
    assert found(manager) == []
    assert found(manager, ProcessState(process=DATALOADER)) == []
    assert found(manager, ProcessState(process=DATALOADER, answers=True)) == ["no_tasks"]
    assert found(manager, ProcessState(process=DATALOADER, is_running=False)) == ["no_tasks"]


def test_agents_from_outside_with_tasks_of_their_own_need_no_queue() -> None:
    """Control: with a dataloader the queue tells; agents of the launcher lease from it alone."""
    server = ServerSnapshot(node_id="a", address="a:1", info=server_pb.GetServerInfoResponse())
    given = {
        "readiness": sample_pb.Readiness(num_admissible_groups=2, groups_per_step=4),
        "servers": (server,),
    }
    manager = ProcessState(process=MANAGER, answers=True)
    assert rules(manager, agents="outside", **given) == [("no_agents", "")]
    loader = ProcessState(process=DATALOADER, answers=True)
    assert rules(manager, loader, agents="outside", **given) == []
    assert rules(manager, agents="runner", **given) == []


def test_the_processes_of_a_folder_are_read_back(tmp_path: Path) -> None:
    """Without a folder the services are those whose addresses are known."""
    (tmp_path / "logs").mkdir()
    write_processes(tmp_path / "logs", [MANAGER, REDIS])
    endpoints = Endpoints(run_id="r", services={"gateway": "127.0.0.1:2"}, folder=tmp_path)
    assert known_processes(endpoints) == [MANAGER, REDIS]
    elsewhere = Endpoints(run_id="r", services={"gateway": "127.0.0.1:2"})
    assert known_processes(elsewhere) == [Process(name="rollout_gateway", address="127.0.0.1:2")]
