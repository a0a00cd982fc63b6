"""The quickstart's task: splits, lengths, score and teacher."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from examples.quickstart import task

PAYLOAD = {"start": 12, "calls": [15, 13]}
RIGHT = ["13 14 15", "14 13"]


def test_each_call_continues_from_the_last_stop() -> None:
    """The environment answers a turn with the cabin's place and the next call."""
    assert task.user_message(PAYLOAD, 0) == "at 12 up to 15"
    assert task.user_message(PAYLOAD, 1) == "at 15 down to 13"


def test_the_right_answers_earn_everything() -> None:
    """A faultless rollout is a success with reward 1."""
    assert task.score(PAYLOAD, RIGHT) == (1.0, True)


@pytest.mark.parametrize(
    "answers",
    [
        ["13 14 15", "14"],
        ["13 14 15", "14 13 12"],
        ["13 wait 14 15", "14 13"],
        ["13 13 14 15", "14 13"],
        ["14 15", "14 13"],
        ["", ""],
        ["13 14 15"],
        [],
    ],
)
def test_any_fault_loses_the_success_half(answers: list[str]) -> None:
    """Stopping short, overshooting, waiting, repeating, skipping, a missing turn: no success."""
    reward, success = task.score(PAYLOAD, answers)
    assert not success
    assert 0.0 <= reward < 0.5


def test_every_floor_after_the_stop_costs() -> None:
    """Each floor after the end lowers the reward."""
    rewards = [task.score(PAYLOAD, [RIGHT[0], RIGHT[1] + " 12" * n])[0] for n in range(5)]
    assert rewards == sorted(rewards, reverse=True)
    assert len(set(rewards)) == len(rewards)


def test_tasks_are_a_function_of_their_seed() -> None:
    """The same seed gives the same tasks, another seed gives others."""
    first = list(task.tasks(1, 50, "train"))
    assert first == list(task.tasks(1, 50, "train"))
    assert first != list(task.tasks(2, 50, "train"))


def test_splits_are_disjoint() -> None:
    """No task is both trained on and held out, whatever the seeds."""
    train = {task.task_name(p) for seed in range(3) for p in task.tasks(seed, 2000, "train")}
    heldout = {task.task_name(p) for seed in range(3) for p in task.tasks(seed, 500, "heldout")}
    assert not train & heldout


def test_lengths_have_a_long_tail() -> None:
    """p99 is at least four times the median, for a rollout and for a turn."""
    answers = [task.paths(payload) for payload in task.tasks(0, 4000, "heldout")]
    # One more for the terminator of each turn.
    turns = sorted(len(path) + 1 for paths in answers for path in paths)
    rollouts = sorted(sum(len(path) + 1 for path in paths) for paths in answers)
    for lengths in (turns, rollouts):
        assert lengths[int(0.99 * len(lengths))] >= 4 * lengths[len(lengths) // 2]


def test_no_constant_answer_is_good() -> None:
    """The most frequent right answer is right for far less than a fifth of the held-out tasks."""
    answers = Counter(str(task.paths(payload)) for payload in task.tasks(0, 2000, "heldout"))
    assert answers.most_common(1)[0][1] <= 0.02 * 2000


def test_a_careful_teacher_is_always_right() -> None:
    """Without noise a demonstration is the right answer."""
    for payload in task.tasks(0, 100, "train"):
        assert task.score(payload, task.demonstration(payload, random.Random(0), 0.0))[1]


def test_a_sloppy_teacher_only_adds_waits() -> None:
    """Its answers without the waits are right, and some of them do wait."""
    rng, waits = random.Random(0), 0
    for payload in task.tasks(0, 100, "train"):
        answers = task.demonstration(payload, rng, 0.2)
        waits += sum(answer.split().count(task.WAIT) for answer in answers)
        cleaned = [" ".join(w for w in a.split() if w != task.WAIT) for a in answers]
        assert task.score(payload, cleaned)[1]
    assert waits > 0
