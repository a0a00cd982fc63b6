"""What `make chaos-restarts` does and counts, without the runs."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from seamflow.errors import UnavailableError
from seamflow.retry import Backoff

from services.launcher.child_process import ProcessPlan
from tests.chaos.restarts.__main__ import (
    ENVIRONMENT,
    LIMITS,
    OF_AGENT,
    OF_ENVIRONMENT,
    ZERO,
    Drill,
    figures_of,
    run_with,
)
from tests.chaos.restarts.restart_run import Outcome
from tests.chaos.restarts.restarts import restarts
from tests.chaos.restarts.signalled import End, SignalledSupervisor
from tests.chaos.suite import broken_limits

SUMMARY = dict.fromkeys((*ZERO, "optimizer_steps", "turns", "rollouts"), 0)


def outcome(
    number: signal.Signals = signal.SIGTERM,
    code: int | None = 0,
    drain: float = 1.0,
    step: float = 2.0,
) -> Outcome:
    """Of a restart."""
    end = End(code=code, seconds=drain)
    return Outcome(
        process="weights", signal=number, end=end, seconds_to_serve=1.0, seconds_to_step=step
    )


def broken(*outcomes: Outcome, errors: tuple[str, ...] = (), **found: int) -> list[str]:
    """The limits that a run with these outcomes breaks."""
    drill = Drill(summary={**SUMMARY, **found}, outcomes=outcomes, errors=errors)
    return broken_limits(figures_of([drill]), LIMITS, ZERO)


def test_each_process_gets_each_signal_in_a_drawn_order() -> None:
    """As often as asked for."""
    made = restarts(OF_AGENT, terms=3, kills=1, seed=5)
    counts = Counter((each.process, each.signal) for each in made)
    assert counts == {
        (name, number): times
        for name in OF_AGENT
        for number, times in ((signal.SIGTERM, 3), (signal.SIGKILL, 1))
    }
    assert made == restarts(OF_AGENT, terms=3, kills=1, seed=5)
    assert made != restarts(OF_AGENT, terms=3, kills=1, seed=6)


def test_every_process_of_the_two_runs_is_restarted(tmp_path: Path) -> None:
    """Those of an environment in the second run, where the others are again."""
    first = run_with(tmp_path / "agent", (), 0)
    assert set(first.plans) == set(OF_AGENT)
    second = run_with(tmp_path / "environment", (), 0, **ENVIRONMENT)
    assert set(second.plans) - set(OF_AGENT) == set(OF_ENVIRONMENT)


def test_what_must_not_happen_is_noticed() -> None:
    """One thing at a time; a killed process need not exit 0."""
    kill = outcome(signal.SIGKILL, -9)
    assert broken(outcome(), kill) == []
    assert broken(outcome(code=70)) == ["drains_unclean"]
    assert broken(outcome(code=None, drain=60.0)) == ["drain_seconds_max", "drains_unclean"]
    assert broken(kill, outcome(step=31.0)) == ["seconds_to_step_max"]
    assert broken(outcome(), errors=("UnavailableError",)) == ["errors_seen_by_agents"]
    assert broken(outcome(), tokens_lost=1) == ["tokens_lost"]
    assert broken(outcome(), process_restarts=1) == ["process_restarts"]


async def test_a_child_is_ended_by_the_signal_and_not_started_again(tmp_path: Path) -> None:
    """Its exit code is that of its own handler, or minus the signal."""
    code = "import signal, sys; signal.signal(15, lambda *a: sys.exit(3)); print('up', flush=True)"
    command = (sys.executable, "-u", "-c", f"{code}; signal.pause()")
    async with SignalledSupervisor(tmp_path) as processes:
        for number, expected in ((signal.SIGTERM, 3), (signal.SIGKILL, -9)):
            (tmp_path / "x.log").unlink(missing_ok=True)
            await processes.start(ProcessPlan(name="x", command=command))
            while not (tmp_path / "x.log").read_text():
                await asyncio.sleep(0.01)
            assert (await processes.end("x", number)).code == expected
        assert processes.num_restarts == 0


async def test_the_control_does_not_resume_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the SDK repeats is raised."""
    from seamflow.client import turn

    from tests.chaos.restarts import impatient_runner

    await turn._wait_or_raise(UnavailableError("gone"), Backoff())
    monkeypatch.setattr(turn, "_wait_or_raise", impatient_runner.at_once)
    with pytest.raises(UnavailableError):
        await turn._wait_or_raise(UnavailableError("gone"), Backoff())
