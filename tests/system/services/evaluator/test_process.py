"""The evaluator as a process: through a whole run, killed in the middle, and set up wrongly."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.evaluator.v1 import evaluator_service_pb2 as pb
from seamflow.evaluator.v1.evaluator_service_pb2_grpc import EvaluatorServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import started
from services.dataloader.cli import await_first_evaluation
from services.dataloader.config import DataloaderConfig
from tests.lib.end_to_end.support import ROOT, Process, child_environment
from tests.lib.evaluator.agent import agent, lease, play
from tests.lib.evaluator.training import Training
from tests.lib.trajectory_manager.client import Client, running_manager

LONG = pytest.mark.long(short="tests/system/services/evaluator/test_process.py")
_LOOK_SECONDS = 0.05
TASKS = '{"task_id": "a", "payload": {}}\n{"task_id": "b", "payload": {}}\n'
BEFORE, BESIDE, FINISHED = (
    pb.EVALUATOR_STATE_BEFORE_TRAINING,
    pb.EVALUATOR_STATE_BESIDE_TRAINING,
    pb.EVALUATOR_STATE_FINISHED,
)


@dataclass(slots=True)
class Rig:
    """An evaluator's process between a trajectory manager and a training."""

    client: Client
    training: Training
    process: Process
    folder: Path

    async def until(self, is_right: Callable[[pb.GetEvaluationsResponse], bool]) -> Any:
        """What it answers once that is right."""
        request = pb.GetEvaluationsRequest(run_id="run")
        async with grpc.aio.insecure_channel(self.process.address) as channel:
            stub = async_stub(EvaluatorServiceStub, channel)
            async with asyncio.timeout(60):
                while not is_right(answer := await stub.GetEvaluations(request)):
                    await asyncio.sleep(_LOOK_SECONDS)
        return answer

    async def start(self) -> None:
        """The process; it may take its time, and others go on."""
        await asyncio.to_thread(self.process.start)

    def lines(self) -> list[dict[str, Any]]:
        """Of evaluation.jsonl."""
        text = (self.folder / "evaluation.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    async def has_ended(self) -> bool:
        """Whether the run has."""
        request = run_pb.GetRunRequest(run_id="run")
        return (await self.client.runs.GetRun(request)).run.HasField("end_time")


@asynccontextmanager
async def rig(folder: Path, training: Training, **settings: object) -> AsyncIterator[Rig]:
    """The evaluator has not started yet."""
    (folder / "heldout.jsonl").write_text(TASKS)
    quick = ServerConfig(drain_seconds=0.2)
    async with (
        running_manager() as port,
        started(training.service(), quick) as training_port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        training.address = f"127.0.0.1:{training_port}"
        process = Process(
            *("services.evaluator", "evaluator", folder),
            run_id="run",
            tasks=folder / "heldout.jsonl",
            folder=folder,
            trajectory_manager=f"127.0.0.1:{port}",
            weights=training.address,
            scheduler=training.address,
            **{"metric": "reward", "samples": 2, **settings},
        )
        made = Rig(Client(channel, "run"), training, process, folder)
        await made.client.create_run()
        try:
            yield made
        finally:
            await asyncio.to_thread(process.stop)


@asynccontextmanager
async def playing(rig: Rig, reward: Callable[[], float] = lambda: 1.0) -> AsyncIterator[None]:
    """Agents work meanwhile, for a reward that may change."""

    async def finish(rollout_id: str) -> None:
        await rig.client.finish(rollout_id, reward())

    work = asyncio.create_task(agent(rig.client, finish))
    try:
        yield
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work


@pytest.mark.timeout(120)
async def test_a_run_is_evaluated_from_before_to_after(tmp_path: Path) -> None:
    """Tasks wait for the first evaluation; the best is kept, the target ends training and run."""
    training = Training()
    reward = [0.0]
    async with rig(tmp_path, training, every_steps=2, stop_target=1.0) as run:
        config = DataloaderConfig(run_id="run", tasks="t.jsonl", evaluator=run.process.address)
        await await_first_evaluation(config.replace(evaluator=None))  # control: nothing to wait for
        waiting = asyncio.create_task(await_first_evaluation(config))
        await run.start()
        await run.until(lambda said: said.num_rollouts == 4)
        assert not waiting.done()
        async with playing(run, lambda: reward[0]):
            await asyncio.wait_for(waiting, 60)
            reward[0], training.step = 1.0, 2
            said = await run.until(lambda said: said.state == FINISHED)
        assert await run.has_ended()
        assert await asyncio.to_thread(run.process.stop) == 0
    assert said.stopped_early == "reward 1 of step 2 reached the target 1"
    labels = [(line["label"], line["mean"], line["is_best"]) for line in run.lines()]
    assert labels == [("before", 0.0, True), ("step-2", 1.0, True), ("after", 1.0, False)]
    assert [line.label for line in said.evaluations] == ["before", "step-2", "after"]
    assert (said.best.step, said.best.checkpoint) == (2, "/checkpoints/best")
    assert [(kept.step, kept.mean) for kept in training.kept] == [(2, 1.0)]
    assert (training.held, training.tracked) == ([2, 0, 3, 0], [0, 2, 3])
    assert training.num_asked_to_finish
    assert "training ends early: reward 1 of step 2 reached the target 1" in said.notes


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("oldest_version", "evaluated"), [(1, 4), pytest.param(5, 5, marks=LONG)])
async def test_steps_that_outrun_the_look_are_evaluated_where_a_checkpoint_is(
    tmp_path: Path, oldest_version: int, evaluated: int
) -> None:
    """At a multiple of every_steps; *control*: the newest, where that version is deleted."""
    training = Training()
    training.oldest_version = oldest_version
    async with rig(tmp_path, training, every_steps=2) as run, playing(run):
        await run.start()
        await run.until(lambda said: said.state == BESIDE)
        training.step = 5
        said = await run.until(lambda said: len(said.evaluations) == 2)
    assert [line.step for line in said.evaluations] == [0, evaluated]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("knows_what_ran", [True, pytest.param(False, marks=LONG)])
async def test_one_that_is_killed_repeats_the_evaluation(
    tmp_path: Path, knows_what_ran: bool
) -> None:
    """Nothing counts twice, and no agent gets what was left queued.

    Control: without the file that names it, agents are given the leftovers too.
    """
    async with rig(tmp_path, Training(last_step=1)) as run:
        await run.start()
        first = None
        while first is None:
            first = await lease(run.client)
        await play(run.client, first, 0)
        await run.client.finish(first.rollout_id, 1.0)
        await run.until(lambda said: said.num_done == 1)
        run.process.kill()
        if not knows_what_ran:
            (tmp_path / "evaluation.running.json").unlink()
        await run.start()
        await run.until(lambda said: said.num_rollouts == 4)
        given = [await lease(run.client) for _ in range(8)]
        of_first = first.task.task_id.partition("@")[2]
        ours = [each for each in given if each is not None]
        old = [each for each in ours if each.task.task_id.endswith(of_first)]
        assert len(old) == (0 if knows_what_ran else 3)
        for each in ours:
            await play(run.client, each, 0)
            await run.client.finish(each.rollout_id, 0.0)
        await run.until(lambda said: said.state == BESIDE)
        (line,) = run.lines()
        assert (line["num_rollouts"], line["mean"]) == (4, 0.0)
        run.process.kill()
        await run.start()  # what is done stays done
        await run.until(lambda said: said.state == BESIDE)
        assert len(run.lines()) == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("oldest_version", "evaluated"), [(1, [0, 2, 4]), (5, [0, 5])])
async def test_a_step_whose_evaluation_was_killed_is_evaluated_though_training_went_on(
    tmp_path: Path, oldest_version: int, evaluated: list[int]
) -> None:
    """*Control*: not if its weights are gone."""
    training = Training()
    async with rig(tmp_path, training, every_steps=2) as run:
        await run.start()
        async with playing(run):
            await run.until(lambda said: said.state == BESIDE)
        training.step = 2
        running = tmp_path / "evaluation.running.json"
        while not running.exists() or '"step-2.' not in running.read_text():
            await asyncio.sleep(_LOOK_SECONDS)
        run.process.kill()
        training.step, training.oldest_version = 5, oldest_version
        await run.start()
        await run.until(lambda said: said.num_rollouts == 4)  # and what was left is taken back
        async with playing(run):
            said = await run.until(lambda said: len(said.evaluations) == len(evaluated))
    assert [line.step for line in said.evaluations] == evaluated


@LONG
@pytest.mark.timeout(120)
async def test_weights_that_come_too_early_are_evaluated_in_place_of_the_first(
    tmp_path: Path,
) -> None:
    """Without a dataloader that waits nobody may have the first weights any more."""
    async with rig(tmp_path, Training()) as run:
        await run.start()
        await run.until(lambda said: said.num_rollouts == 4)
        run.training.step = 1
        said = await run.until(lambda said: bool(said.notes))
        assert "weight version 1 was published before the first weights" in said.notes[0]
        async with playing(run):
            await run.until(lambda said: said.state == BESIDE)
        (line,) = run.lines()
        assert (line["label"], line["weight_version"], line["num_rollouts"]) == ("before", 1, 4)


@LONG
@pytest.mark.timeout(120)
async def test_the_last_weights_are_evaluated_when_no_further_step_comes(tmp_path: Path) -> None:
    """As the launcher asks when all tasks are used up; the trainer waits for ever."""
    async with rig(tmp_path, Training(), end_run="false") as run:
        async with playing(run):
            await run.start()
            await run.until(lambda said: said.state == BESIDE)
            run.training.step = 3
            async with grpc.aio.insecure_channel(run.process.address) as channel:
                stub = async_stub(EvaluatorServiceStub, channel)
                await stub.FinishEvaluations(pb.FinishEvaluationsRequest(run_id="run"))
            said = await run.until(lambda said: said.state == FINISHED)
        assert [(line.label, line.step) for line in said.evaluations] == [
            ("before", 0),
            ("after", 3),
        ]
        assert not await run.has_ended()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "missing.jsonl"], "held-out tasks: tasks: 'missing.jsonl' does not exist in"),
        (["--tasks", "environment://a:1"], "num_heldout is 0"),
        (["--tasks", "{tasks}", "--stop-patience", "2"], "give every_steps"),
        (["--tasks", "{tasks}", "--folder", "{tasks}/x"], "cannot be made"),
        (["--tasks", "{tasks}", "--every-step", "2"], "--every-step"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    """With the exit code that says that a restart would not help."""
    tasks = tmp_path / "heldout.jsonl"
    tasks.write_text(TASKS)
    given = ["--run-id", "run", "--folder", str(tmp_path), "--admin-port", "-1"]
    filled = [each.format(tasks=tasks) for each in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "services.evaluator", *given, *filled],
        cwd=ROOT,
        env=child_environment({}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (64, 78), done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
