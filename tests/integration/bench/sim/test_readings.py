"""What the processes of an emulated run wrote becomes one result, whose bins add up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.sim.emulation.readings import Readings
from bench.sim.modes import Split
from tests.lib.bench_sim.support import setting

SPEED = 2.0
BEGIN = 1000.0
"""Seconds since 1970 when the engines began."""


def written(file: Path, lines: Iterable[dict[str, object]]) -> None:
    """A JSON line each."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def note(at: float, decode: float, switching: float = 0.0) -> dict[str, object]:
    """What an engine had done `at` seconds after the beginning, in seconds of this machine."""
    names = ("prefill", "repeated_prefill")
    zeros = dict.fromkeys(names, 0.0)
    return {"time": BEGIN + at, "decode": decode, "switching": switching, **zeros}


@pytest.fixture
def readings(tmp_path: Path) -> Readings:
    """Two engines for 40 s, of which one is lent by a gang that trains from 20 s to 30 s."""
    run = replace(
        setting("multiplexed"), split=Split(rollout=1, train=0, both=1), warm_up=1, steps=1
    )
    written(tmp_path / "rollout-0000.busy.jsonl", [note(0, 0), note(40, 80)])
    written(tmp_path / "both-0000.busy.jsonl", [note(0, 0), note(20, 40), note(40, 40)])
    moments = ((20.0, 30.0, "training"), (30.0, 32.0, "switching"))
    gang = ({"begin": BEGIN + a, "end": BEGIN + b, "doing": doing} for a, b, doing in moments)
    written(tmp_path / "gang.jsonl", gang)
    first = {"step": 1, "base_weight_version": 0, "max_staleness": 0, "weight_version": 1}
    put_off = {"step": 2, "base_weight_version": 1, "max_staleness": 1}
    steps: list[dict[str, object]] = [
        {"time": BEGIN + 10, **first},
        {"time": BEGIN + 35, **put_off},
    ]
    written(tmp_path / "metrics.jsonl", steps)
    return Readings(
        setting=run,
        speed=SPEED,
        trainer_file=tmp_path / "metrics.jsonl",
        gang_file=tmp_path / "gang.jsonl",
        engine_folder=tmp_path,
    )


def test_bins_are_emulated_seconds_between_two_steps_and_add_up(readings: Readings) -> None:
    """From 20 s to 70 s of emulated time: two nodes, 100 seconds."""
    result = readings.result()
    spent = result.node_seconds
    assert result.seconds == 50.0
    assert spent.total == pytest.approx(100.0)
    assert spent.generation == pytest.approx(50.0 + 20.0)
    assert spent.training == pytest.approx(20.0)
    assert spent.switching == pytest.approx(4.0)
    assert spent.idle == pytest.approx(6.0)
    assert result.rollouts_per_second == readings.setting.workload.rollouts_per_step / 50.0
    assert (result.staleness, result.lag) == ((1,), (1,))
    assert result.step_ends == (20.0, 70.0)


def test_timeline_shows_what_each_node_did_most(readings: Readings) -> None:
    """Equal neighbours are one stretch."""
    stretches = readings.result().stretches
    assert [doing for _, doing in stretches["rollout-0000"]] == ["generation"]
    assert stretches["both-0000"] == [
        (0.0, "generation"),
        (40.0, "training"),
        (60.0, "switching"),
        (64.0, "idle"),
    ]


def test_a_line_that_is_being_written_does_not_count(readings: Readings) -> None:
    """A step is over when its line is whole."""
    with readings.trainer_file.open("a") as file:
        file.write('{"time": 10')
    assert readings.num_steps() == 2
