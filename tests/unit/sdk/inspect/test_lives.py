"""A run's folder knows each life of its launcher, and which of them were killed."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from seamflow.inspect.lives import (
    FILE,
    Life,
    give_sign,
    lives,
    note,
    recorded_life,
    stops,
)
from seamflow.inspect.run_folders import run_state
from seamflow.inspect.status_screen import life_lines

ENDED_PROCESS = {"host": socket.gethostname(), "boot": "another", "pid": 1, "ticks": "1"}


def add(folder: Path, state: str, time: float, **more: object) -> None:
    """A line as a launcher writes it."""
    with (folder / FILE).open("a") as file:
        file.write(json.dumps({"state": state, "reason": "", "time": time, **more}) + "\n")


def kill(folder: Path, last_sign: float = 1_000.0) -> None:
    """What a launcher of another boot of this host leaves that gave its last sign then."""
    add(folder, "started", 100.0, process=ENDED_PROCESS)
    os.utime(folder / FILE, (last_sign, last_sign))


def test_a_life_that_ends_says_how(tmp_path: Path) -> None:
    """It is running before; a second one is counted beside it."""
    with recorded_life(tmp_path):
        (now,) = lives(tmp_path)
        assert (now.state, now.end) == ("running", None)
    with pytest.raises(KeyboardInterrupt), recorded_life(tmp_path):
        note(tmp_path, "stopping", "SIGTERM")
        raise KeyboardInterrupt("SIGTERM")
    with pytest.raises(OSError, match="full"), recorded_life(tmp_path):
        raise OSError("disk full")
    states = [(life.state, life.reason) for life in lives(tmp_path)]
    assert states == [("finished", ""), ("stopped", "SIGTERM"), ("failed", "disk full")]


def test_a_killed_life_is_found_by_a_reader_and_recorded_by_the_next(tmp_path: Path) -> None:
    """It ended with its last sign of life, whenever somebody looks."""
    kill(tmp_path)
    (before,) = lives(tmp_path)
    assert (before.state, before.end, run_state(tmp_path)) == ("killed", 1_000.0, "killed")
    with recorded_life(tmp_path):
        pass
    states = [json.loads(line)["state"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert states == ["started", "killed", "started", "finished"]
    assert lives(tmp_path)[0] == before


def test_a_life_on_another_host_ends_when_it_gives_no_sign(tmp_path: Path) -> None:
    """*Control*: as long as it does, it runs."""
    add(tmp_path, "started", 100.0, process={**ENDED_PROCESS, "host": "elsewhere"})
    assert lives(tmp_path)[0].state == "running"
    os.utime(tmp_path / FILE, (1_000.0, 1_000.0))
    assert lives(tmp_path)[0].state == "killed"
    give_sign(tmp_path)
    assert lives(tmp_path)[0].state == "running"


def test_a_line_that_was_cut_spoils_no_other_one(tmp_path: Path) -> None:
    """Neither the one before nor the next."""
    kill(tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"state": "sto')
    with recorded_life(tmp_path):
        pass
    assert [life.state for life in lives(tmp_path)] == ["killed", "finished"]


def test_a_second_ctrl_c_leaves_a_stopped_life(tmp_path: Path) -> None:
    """It ends the process at once; that it was asked to stop is known."""
    kill(tmp_path)
    add(tmp_path, "stopping", 900.0, reason="Ctrl-C")
    os.utime(tmp_path / FILE, (1_000.0, 1_000.0))
    (life,) = lives(tmp_path)
    assert (life.state, life.reason, life.stopping) == ("stopped", "Ctrl-C", 900.0)


def test_restarts_and_seconds_of_training_are_those_of_each_life(tmp_path: Path) -> None:
    """A killed one trained until its last sign of life, a stopped one until it was asked."""
    for state, time in (("started", 0), ("learning", 10), ("learned", 30), ("finished", 40)):
        add(tmp_path, state, time)
    for state, time in (("started", 100), ("learning", 110), ("stopping", 150), ("stopped", 170)):
        add(tmp_path, state, time)
    add(tmp_path, "started", 200, process=ENDED_PROCESS)
    add(tmp_path, "learning", 210)
    add(tmp_path, "restarted", 220, name="trainer", reason="signal 9")
    os.utime(tmp_path / FILE, (260.0, 260.0))
    found = lives(tmp_path)
    assert [life.learning_seconds(999.0) for life in found] == [20.0, 40.0, 50.0]
    assert [[r.name for r in life.restarts] for life in found] == [[], [], ["trainer"]]


def test_stops_lie_between_lives() -> None:
    """From when the first was asked to stop; after the last there is no start."""
    found = [
        Life(start=1.0, end=9.0, state="stopped", stopping=8.0),
        Life(start=20.0, end=30.0, state="killed"),
        Life(start=31.0),
    ]
    assert stops(found) == [(8.0, 20.0), (30.0, 31.0)]
    assert stops(found[:2])[-1] == (30.0, float("inf"))


def test_a_folder_of_before_has_its_last_life(tmp_path: Path) -> None:
    """Release 0.2 wrote its end alone; a folder without any has none."""
    assert lives(tmp_path) == []
    for name, when in (("addresses.json", 100), ("end.json", 160)):
        (tmp_path / name).write_text('{"state": "failed", "reason": "no metric"}')
        os.utime(tmp_path / name, (when, when))
    assert lives(tmp_path) == [Life(start=100.0, end=160.0, state="failed", reason="no metric")]


def test_the_newest_lives_are_shown_with_their_numbers() -> None:
    """When each began, how long it was, and how it ended."""
    found = [Life(start=3600.0 * i, end=3600.0 * i + 90, state="killed") for i in range(6)]
    shown = list(life_lines([*found, Life(start=36_000.0)], now=36_030.0))
    assert len(shown) == 4
    assert shown[0] == "lives    4: from 1970-01-01 03:00 UTC, 90 s, killed"
    assert shown[-1] == "         7: from 1970-01-01 10:00 UTC, 30 s, running"
