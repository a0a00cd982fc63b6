"""The quickstart's task: drive a lift floor by floor, one call after the other.

A task names the floor where the cabin stands and the floors that call it. In each turn one call
arrives ("at 12 up to 19"); the agent prints every floor that the cabin passes, the called floor
last, and ends its answer. The next turn continues from there.
Most calls are a few floors away and a few are very far, so the lengths have a long tail.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

__all__ = [
    "FLOORS",
    "TURNS",
    "WAIT",
    "Payload",
    "Split",
    "demonstration",
    "floor_name",
    "paths",
    "score",
    "task_name",
    "tasks",
    "user_message",
]

FLOORS = 36
"""Floors of the building, named 00 to 35."""
TURNS = 2
"""Calls in a task, one user message each."""

WAIT = "wait"
"""The word with which a sloppy teacher starts its answer; always wrong."""

Split = Literal["train", "heldout"]
Payload = Mapping[str, Any]

# Lengths: one scale for the whole task and a smaller variation of each call; p99 / median of the
# floors in a task is about 5.
_SCALE_MEAN, _SCALE_SIGMA, _CALL_SIGMA = 1.2, 1.0, 0.25
# Half, so that there are enough short tasks to hold out: both splits are equally hard.
_HELDOUT_SHARE = 0.5


def tasks(seed: int, count: int, split: Split) -> Iterator[dict[str, Any]]:
    """Yield `count` tasks of `split` as {"start": floor, "calls": [floor, ...]}.

    A hash of the task itself decides its split, so the two never meet, whatever the seeds. Short
    tasks are few and therefore come again; leaving repeats out would cut the lengths' shape.
    """
    rng = random.Random(f"{split}-{seed}")
    found = 0
    while found < count:
        payload = _draw(rng)
        if _split_of(task_name(payload)) == split:
            found += 1
            yield payload


def task_name(payload: Payload) -> str:
    """Return the task's name, the same for equal tasks: "12-19-16"."""
    return "-".join(map(floor_name, (payload["start"], *payload["calls"])))


def floor_name(floor: int) -> str:
    """Return the token that names `floor`."""
    return f"{floor:02d}"


def paths(payload: Payload) -> list[list[int]]:
    """Return the right answers, as floors: one list for each turn."""
    stops = [payload["start"], *payload["calls"]]
    return [_path(a, b) for a, b in itertools.pairwise(stops)]


def user_message(payload: Payload, turn: int) -> str:
    """Return the user's message of `turn`, counted from 0: "at 12 up to 19"."""
    stops = [payload["start"], *payload["calls"]]
    here, there = stops[turn], stops[turn + 1]
    direction = "up" if there > here else "down"
    return f"at {floor_name(here)} {direction} to {floor_name(there)}"


def score(payload: Payload, answers: Sequence[str]) -> tuple[float, bool]:
    """Return (reward in [0, 1], success) of the answers of all turns.

    Half of the reward is the right prefix's share of each answer, mean over the turns; the other
    half is for a rollout without any fault. The share is of the longer of answer and path, so that
    each floor after the stop costs reward; otherwise printing to the token limit would be free.
    """
    shares, faultless = 0.0, len(answers) == len(payload["calls"])
    for path, answer in zip(paths(payload), answers, strict=False):
        expected, given = [floor_name(floor) for floor in path], answer.split()
        shares += _common_prefix(expected, given) / max(len(expected), len(given))
        faultless = faultless and expected == given
    return 0.5 * shares / len(payload["calls"]) + 0.5 * faultless, faultless


def demonstration(payload: Payload, rng: random.Random, noise: float) -> list[str]:
    """Return a teacher's answers; with probability `noise` one begins with a wait, a fault."""
    answers = [" ".join(map(floor_name, path)) for path in paths(payload)]
    return [f"{WAIT} {answer}" if rng.random() < noise else answer for answer in answers]


def _draw(rng: random.Random) -> dict[str, Any]:
    scale = rng.lognormvariate(_SCALE_MEAN, _SCALE_SIGMA)
    start = here = rng.randrange(FLOORS)
    calls: list[int] = []
    while len(calls) < TURNS:
        distance = max(1, round(scale * rng.lognormvariate(0.0, _CALL_SIGMA)))
        reachable = [f for f in (here - distance, here + distance) if 0 <= f < FLOORS]
        if not reachable:
            return _draw(rng)
        here = rng.choice(reachable)
        calls.append(here)
    return {"start": start, "calls": calls}


def _split_of(name: str) -> Split:
    digest = hashlib.sha256(name.encode()).digest()
    return "heldout" if digest[0] < 256 * _HELDOUT_SHARE else "train"


def _path(here: int, there: int) -> list[int]:
    step = 1 if there > here else -1
    return list(range(here + step, there + step, step))


def _common_prefix(expected: Sequence[str], given: Sequence[str]) -> int:
    length = 0
    for left, right in zip(expected, given, strict=False):
        if left != right:
            break
        length += 1
    return length
