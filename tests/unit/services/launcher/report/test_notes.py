"""What the terminal tells of failed rollouts: one line for each cause."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

from seamflow.common.v1 import tokens_pb2
from seamflow.inspect.snapshot import Snapshot
from seamflow.trainer.v1.trainer_service_pb2 import GetStatusResponse
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.sample_service_pb2 import Readiness

from services.launcher.report.notes import (
    AlarmNotes,
    FailureNotes,
    HealthNotes,
    stopping_note,
)
from services.launcher.service_clients import connected
from tests.lib.launcher.support import make_config, make_layout
from trajectory_manager.service.rollouts import EXPIRED

ENVIRONMENT = tokens_pb2.FAILURE_CLASS_ENVIRONMENT
INFRASTRUCTURE = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
TIMEOUT = tokens_pb2.FAILURE_CLASS_TIMEOUT


def failed(
    rollout_id: str,
    message: str,
    failure_class: tokens_pb2.FailureClass.ValueType = ENVIRONMENT,
) -> trajectory_pb2.Trajectory:
    """A failed rollout of the task that its name begins with."""
    failure = tokens_pb2.Failure(failure_class=failure_class, message=message)
    group = rollout_id.partition("/")[0]
    return trajectory_pb2.Trajectory(rollout_id=rollout_id, group_id=group, failure=failure)


class Store:
    """Rollouts, and how often they were listed."""

    def __init__(self) -> None:
        self.rollouts: list[trajectory_pb2.Trajectory] = []
        self.num_listed = 0

    async def listed(self) -> AsyncIterator[trajectory_pb2.Trajectory]:
        """All of them."""
        self.num_listed += 1
        for each in self.rollouts:
            yield each


async def no_letters() -> AsyncIterator[task_pb.DeadLetter]:
    """Of a run in which they were requeued meanwhile."""
    for letter in list[task_pb.DeadLetter]():
        yield letter


async def test_each_cause_is_told_once_with_task_and_rollout() -> None:
    """Failures that differ in names and numbers only are one cause."""
    store = Store()
    store.rollouts = [
        failed("t1/0/1", "step 0 of task 't1' raised KeyError('x') at env.py:7"),
        failed("t2/0/1", "step 3 of task 't2' raised KeyError('x') at env.py:7"),
        failed("t1/0/2", "step 0 of task 't1' raised OSError('disk') at env.py:7"),
        failed("t1/0/3", "", tokens_pb2.FAILURE_CLASS_CANCELLED),
        trajectory_pb2.Trajectory(rollout_id="t1/0/4"),
    ]
    notes = FailureNotes(store.listed, no_letters)
    first, second = await notes.look(Readiness(num_replaced_samples=3))
    assert first.startswith(
        "failure ENVIRONMENT of rollout t2/0/1: step 3 of task 't2' raised KeyError('x') at "
        "env.py:7. Correct the agent"
    )
    assert "OSError('disk')" in second
    store.rollouts.append(failed("t9/0/1", "step 1 of task 't9' raised KeyError('x') at env.py:7"))
    assert await FailureNotes(store.listed, no_letters).look(Readiness()) == []
    notes._next = 0.0
    assert await notes.look(Readiness(num_replaced_samples=4)) == []
    store.rollouts.append(failed("t9/0/2", "the episode took over 5 s", TIMEOUT))
    notes._next = 0.0
    (third,) = await notes.look(Readiness(num_replaced_samples=5))
    assert "failure TIMEOUT of rollout t9/0/2: the episode took over 5 s. Find what" in third


async def test_nothing_is_listed_while_nothing_fails() -> None:
    """Nor while the trajectory manager does not answer."""
    store = Store()
    notes = FailureNotes(store.listed, no_letters)
    for readiness in (None, Readiness(num_ready_groups=4), Readiness(num_ready_groups=5)):
        assert await notes.look(readiness) == []
    assert store.num_listed == 0
    await notes.look(Readiness(num_dead_letters=1))
    assert store.num_listed == 1


async def test_growing_numbers_of_dead_letters_are_shown() -> None:
    """The first one, then four times as many: a run that only fails is not silent."""
    notes = FailureNotes(Store().listed, no_letters)
    lines_by_look = []
    for number in (1, 2, 3, 4, 15, 16):
        notes._next = 0.0
        lines_by_look.append(await notes.look(Readiness(num_dead_letters=number)))
    assert [len(lines) for lines in lines_by_look] == [1, 0, 0, 1, 0, 1]
    assert lines_by_look[-1][0].startswith(
        "dead letters: 16, tasks that left the run without being trained"
    )


async def test_dead_letters_are_told_with_their_reasons() -> None:
    """Those that began before this life waited while the run was stopped, and are told as that."""
    store, old = Store(), task_pb.DEAD_LETTER_REASON_DROPPED
    for name, began in (("a", 90), ("b", 110)):
        rollout = trajectory_pb2.Trajectory(rollout_id=f"{name}/0/1", group_id=name)
        rollout.create_time.FromSeconds(began)
        store.rollouts.append(rollout)

    async def letters() -> AsyncIterator[task_pb.DeadLetter]:
        for name, reason in (("a", old), ("b", old), ("c", task_pb.DEAD_LETTER_REASON_FAILURES)):
            yield task_pb.DeadLetter(task=trajectory_pb2.Task(task_id=name), reason=reason)

    notes = FailureNotes(store.listed, letters, lambda: 100.0)
    (line,) = await notes.look(Readiness(num_dead_letters=3))
    assert "; 1 too old for max_staleness, as the run was stopped while they waited;" in line
    assert "; 1 too old for max_staleness;" in line
    assert "; 1 with rollouts that failed too often;" in line
    del store.rollouts[1:]

    async def waited() -> AsyncIterator[task_pb.DeadLetter]:
        yield task_pb.DeadLetter(task=trajectory_pb2.Task(task_id="a"), reason=old)

    alone = FailureNotes(store.listed, waited, lambda: 100.0)
    (line,) = await alone.look(Readiness(num_dead_letters=1))
    assert line.startswith("1 groups are not trained, too old for max_staleness, as the run was")


async def test_a_stopped_agent_is_not_blamed_on_a_server() -> None:
    """In the manager's own words for a lease that nobody renewed."""
    store = Store()
    stopped = failed("t1/0/1", str(EXPIRED.failure_message), INFRASTRUCTURE)
    store.rollouts = [stopped, failed("t2/0/1", "connection refused", INFRASTRUCTURE)]
    lines = await FailureNotes(store.listed, no_letters).look(Readiness(num_replaced_samples=2))
    agent, server = sorted(lines, key=lambda line: "lease expired" not in line)
    assert "Nothing is wrong if its agent was stopped" in agent
    assert "named server" in server


def test_a_stop_says_what_it_drops_and_where_it_goes_on() -> None:
    """By the newest step that is recorded, which a look may not have seen yet."""
    training = GetStatusResponse(step=6, num_steps=9, checkpoint_step=5)
    seen = Snapshot(trainer=training, readiness=Readiness(num_running_rollouts=12))
    line = stopping_note("SIGTERM", seen, [{"step": 7}])
    assert line.startswith("stopping (SIGTERM); 12 running rollouts are cut; step 8 of 9, in prog")
    assert "from the checkpoint of step 5 and repeats 2 steps" in line
    assert "is dropped" not in stopping_note("Ctrl-C", Snapshot(), [])


def test_each_alarm_is_told_once() -> None:
    """Also after a restart of the trainer, which has forgotten it or raises it again."""
    notes = AlarmNotes()
    assert notes.look(None) == []
    assert notes.look(GetStatusResponse(alarms=["a", "b", "a"])) == ["alarm: a", "alarm: b"]
    assert notes.look(GetStatusResponse()) == []
    assert notes.look(GetStatusResponse(alarms=["b", "c"])) == ["alarm: c"]


def written(folder: Path, *rewards: float) -> None:
    """Steps with these mean rewards; 0 is that of all rollouts."""
    lines = (
        {"step": i, "reward_mean": reward, "reward_std": float(reward > 0)}
        for i, reward in enumerate(rewards, 1)
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


async def test_a_finding_has_a_line_when_it_appears_and_when_it_ends(tmp_path: Path) -> None:
    """None in between, and none while the trajectory manager is silent."""
    config, ready = make_config(), sample_pb.Readiness(groups_per_step=4)
    async with connected(config, make_layout(config, tmp_path)) as services:
        notes = HealthNotes(tmp_path, services)
        assert await notes.look(ready) == []
        written(tmp_path, 0, 0, 0)
        assert await notes.look(None) == []
        (line,) = await notes.look(ready)
        assert line.startswith("health (rewards_equal): All rewards of the last 3 steps are 0.000")
        written(tmp_path, 0, 0, 0, 0)
        assert await notes.look(ready) == []
        written(tmp_path, 0, 0, 0, 0, 0.5)
        assert await notes.look(ready) == ["health (rewards_equal): over"]
