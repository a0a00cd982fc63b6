"""The agent runner against real services: many at once, every ending has its failure class."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from seamflow import Agent
from seamflow.common.v1 import tokens_pb2
from seamflow.runner.agent_runner import AgentRunner, RunnerConfig, load_agent
from seamflow.runner.command_line import main

from tests.lib.sdk.agents import Answers, Breaks, Echoes, Exits, Waits
from tests.lib.sdk.support import TOKENS, Gateway, serving

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def running(agent: Agent, gateway: Gateway, **options: object) -> AsyncIterator[None]:
    """A runner at work on these tasks, stopped at the end."""
    async with serving(gateway.added()) as address, asyncio.timeout(20):
        config = RunnerConfig(
            run_id="run",
            gateway=address,
            **options,  # type: ignore[arg-type]
        )
        stop = asyncio.Event()
        runner = asyncio.create_task(AgentRunner(agent, config).run(stop))
        yield
        stop.set()
        await runner


async def test_a_task_becomes_a_finished_rollout(tmp_path: Path) -> None:
    """Lease, rollout under that lease, turn, reward; every chunk is in the log.

    One address and one credential are enough.
    """
    gateway, log = Gateway(payloads=['{"reward": 0.5}']), tmp_path / "tokens.jsonl"
    async with running(Answers(), gateway, token_log=str(log)):
        assert await gateway.closed.get() == "rollout-0"
    assert gateway.started == []
    finished = gateway.finished[0]  # then, if stopped before it heard the answer, given back
    assert finished.rewards.rewards[0].value == 0.5
    assert set(gateway.credentials) == {"credential of rollout-0"}
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [token for line in logged for token in line["token_ids"]] == TOKENS


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
async def test_a_lease_that_fails_does_not_end_the_runner(code: grpc.StatusCode) -> None:
    """A gateway or manager restarts, or has a bug: the next lease may succeed."""
    gateway = Gateway(payloads=['{"reward": 1}'])
    gateway.lease_failures = [code, code]
    async with running(Answers(), gateway, concurrency=1):
        assert await gateway.closed.get() == "rollout-0"


async def test_no_more_than_concurrency_rollouts_at_once() -> None:
    """Three workers hold three leases while two tasks wait."""
    agent = Waits()
    async with running(agent, Gateway(payloads=["{}"] * 5), concurrency=3):
        began = {await agent.began.get() for _ in range(3)}
    assert began == {"task-0", "task-1", "task-2"}
    assert agent.began.empty()
    assert agent.cancelled.qsize() == 3


async def test_an_evaluation_is_not_kept_waiting_by_training() -> None:
    """All workers wait, as for new weights; a task of an evaluation begins all the same."""
    agent, gateway = Waits(), Gateway(payloads=["{}"] * 5)
    async with running(agent, gateway, concurrency=3):
        for _ in range(3):
            await agent.began.get()
        gateway.evaluation.append("{}")
        assert await agent.began.get() == "task-3"
    assert agent.cancelled.qsize() == 4


async def test_a_lease_is_given_back_where_the_rollout_could_not_be_closed() -> None:
    """The gateway refuses its turn for good: its sample is replaced at once."""
    gateway = Gateway([2], grpc.StatusCode.INVALID_ARGUMENT, payloads=['{"reward": 1}'])
    async with running(Answers(), gateway):
        assert await gateway.closed.get() == "rollout-0"
    (finished,) = gateway.finished
    assert finished.failure.failure_class == tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE


@pytest.mark.parametrize(("most", "calls"), [(8, 8), (1, 50)], ids=["many", "an older manager"])
async def test_one_worker_asks_for_all_that_wait(most: int, calls: int) -> None:
    """A thousand calls would cost the manager more than the tasks; all get theirs at once."""
    gateway, agent = Gateway(payloads=["{}"] * 50, most=most), Waits()
    async with running(agent, gateway, concurrency=60):
        began = {await agent.began.get() for _ in range(50)}
        await asyncio.sleep(0.2)
    assert len(began) == 50
    assert len(gateway.asked) <= calls
    assert gateway.most_asking == 1


async def test_a_rollout_past_its_deadline_is_a_timeout() -> None:
    """It is closed without a reward."""
    gateway = Gateway(payloads=["{}"])
    async with running(Waits(), gateway, rollout_timeout=0.05):
        await gateway.closed.get()
    assert gateway.finished[0].failure.failure_class == tokens_pb2.FAILURE_CLASS_TIMEOUT


@pytest.mark.parametrize(
    ("agent", "raised"), [(Breaks(), "RuntimeError('no browser')"), (Exits(), "SystemExit(3)")]
)
async def test_an_exception_of_the_agent_is_an_environment_failure(
    agent: Agent, raised: str
) -> None:
    """A broken environment is never a reward, and the runner goes on."""
    gateway = Gateway(payloads=["{}", "{}"])
    async with running(agent, gateway, concurrency=1):
        assert [await gateway.closed.get() for _ in range(2)] == ["rollout-0", "rollout-1"]
    assert gateway.finished[0].failure.failure_class == tokens_pb2.FAILURE_CLASS_ENVIRONMENT
    message = gateway.finished[0].failure.message
    assert message.startswith(f"agent on task 'task-0' raised {raised} at ")
    assert "tests/lib/sdk/agents.py:" in message


@pytest.mark.parametrize("reward", ["null", '"good"', "NaN"])
async def test_a_reward_that_is_no_number_is_an_environment_failure(reward: str) -> None:
    """It is never trained on, and the message says what to return."""
    gateway = Gateway(payloads=[f'{{"reward": {reward}}}'])
    async with running(Echoes(), gateway):
        await gateway.closed.get()
    assert gateway.finished[0].failure.failure_class == tokens_pb2.FAILURE_CLASS_ENVIRONMENT
    assert "return a finite float" in gateway.finished[0].failure.message


async def test_a_lost_lease_cancels_its_rollout_only() -> None:
    """The agent of the lost lease is cancelled, it completes nothing, and the next task starts."""
    gateway, agent = Gateway(payloads=["{}", "{}"], lease_seconds=0.3), Waits()
    async with running(agent, gateway, concurrency=1):
        assert await agent.began.get() == "task-0"
        gateway.lost.add("rollout-0")
        assert await agent.cancelled.get() == "task-0"
        assert await agent.began.get() == "task-1"
        while await gateway.extended.get() != ["rollout-1"]:
            pass
        assert agent.cancelled.empty()
        assert gateway.finished == []


async def test_a_run_that_has_ended_ends_the_runner() -> None:
    """Rollouts in progress are finished first."""
    gateway = Gateway(payloads=['{"reward": 1}'])
    async with serving(gateway.added()) as address, asyncio.timeout(20):
        runner = AgentRunner(Answers(), RunnerConfig(run_id="run", gateway=address, concurrency=3))
        working = asyncio.create_task(runner.run(asyncio.Event()))
        await gateway.closed.get()
        assert not working.done()
        gateway.ended = True
        await working
    assert len(gateway.finished) == 1


async def test_sigterm_ends_the_process_cleanly() -> None:
    """The real process, stopped in the middle of rollouts, gives them back and exits 0."""
    gateway = Gateway(payloads=["{}", "{}"], lease_seconds=0.3)
    async with serving(gateway.added()) as address:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "seamflow.runner", "--agent", "tests.lib.sdk.agents:Waits", "--run-id", "run"),
            *("--gateway", address),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sdk")])},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(20):
                while len(await gateway.extended.get()) < 2:
                    pass
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
                assert {finished.failure.failure_class for finished in gateway.finished} == {
                    tokens_pb2.FAILURE_CLASS_CANCELLED
                }
                assert len(gateway.finished) == 2
        finally:
            if process.returncode is None:
                process.kill()


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("agents", "write it as 'package.module:Class'"),
        ("nowhere.agents:A", "is its folder on PYTHONPATH?"),
        ("tests.lib.sdk.agents:Missing", "has no attribute 'Missing'"),
        ("tests.lib.sdk.agents:NotAsync", "has no 'async def run(self, task, rollout)'"),
    ],
)
def test_a_bad_agent_name_says_the_cure(
    name: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 78 and one line that names the agent."""
    with pytest.raises(SystemExit) as ended:
        main(["--agent", name, "--run-id", "run"])
    assert ended.value.code == 78
    said = capsys.readouterr().err
    assert name in said
    assert cure in said


def test_settings_that_could_never_work_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 78 with the field, its value and the bound."""
    with pytest.raises(SystemExit) as ended:
        main(["--agent", "tests.lib.sdk.agents:Waits", "--run-id", "run", "--concurrency", "0"])
    assert ended.value.code == 78
    assert "concurrency is 0: must be at least 1" in capsys.readouterr().err


def test_an_unknown_flag_is_wrong_usage() -> None:
    """Exit code 64, as for every process of seamflow."""
    with pytest.raises(SystemExit) as ended:
        main(["--agent", "x:y", "--run-id", "run", "--nonsense"])
    assert ended.value.code == 64


def test_an_agent_is_loaded_by_name() -> None:
    """A class is made into an object."""
    assert isinstance(load_agent("tests.lib.sdk.agents:Answers"), Answers)
