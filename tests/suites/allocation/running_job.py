"""A training job through the real launcher: two nodes that may train, one that only generates."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
from seamflow.channel import connect
from seamflow.errors import decode
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

from tests.suites.allocation.paced_agent import PACE_FILE
from tests.suites.allocation.slow_training import ROW_SECONDS
from tools.provenance import ROOT

_CONFIG = """\
[launcher]
name = "allocation"
prepare = "tests.lib.end_to_end.quickstart_files"
model = "{run}/prepared/model"
tasks = "{run}/prepared/tasks.jsonl"
agent = "tests.suites.allocation.paced_agent:PacedAgent"
nodes = ["node-a: rollout train", "node-b: rollout train", "node-c: rollout"]
trainer_nodes = 2
token_audit = true
group_size = 4
groups_per_step = 4
max_staleness = 1
concurrency = 32
console = false

[trainer]
replicas = 2
num_steps = 100000

[trainer.algorithm]
name = "tests.suites.allocation.slow_training:SlowGrpo"

[scheduler.allocation]
max_train_nodes = 2

[rollout_server]
engine = "fake"
fake_vocab_size = 46
fake_mean_tokens = 16

[dataloader]
epochs = 0
"""
_LOOK_SECONDS = 0.1
_STALLED_SECONDS = 240.0
_END_SECONDS = 60.0


@dataclass(slots=True)
class RunningJob:
    """A job under way, seen by its files, its scheduler and its processes."""

    launcher: subprocess.Popen[bytes]
    folder: Path
    events: list[scheduler_pb.AllocationEvent] = field(default_factory=list)
    """The audit log so far."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "runs" / "allocation"

    @property
    def steps(self) -> Sequence[dict[str, Any]]:
        """Records of the optimizer steps so far."""
        return lines(self.run / "metrics.jsonl")

    @property
    def step_seconds(self) -> float:
        """From one of the newest steps to the next."""
        times = [step["time"] for step in self.steps[-4:]]
        return float(times[-1] - times[0]) / (len(times) - 1)

    def pace(self, seconds: float) -> None:
        """Let each episode begin this much later from now on."""
        pace_file(self.folder).write_text(str(seconds))

    def causes(self, kind: str) -> Sequence[str]:
        """Of the entries of a kind in the audit log."""
        return [event.cause for event in self.events if event.kind == kind]

    def processes(self, *words: str) -> Iterator[psutil.Process]:
        """Those below the launcher whose command has all these words, and no torchrun."""
        for process in psutil.Process(self.launcher.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if set(words) <= {*command, *process.environ().values()}:
                    yield process

    async def until(
        self, what: str, is_so: Callable[[], bool], seconds: float = _STALLED_SECONDS
    ) -> float:
        """Seconds until something is so. Raises `RuntimeError` if the job ends or stands still."""
        began = time.monotonic()
        while not is_so():
            if self.launcher.poll() is not None or time.monotonic() - began > seconds:
                log = (self.folder / "terminal.log").read_text(errors="replace")
                newest = [f"{each.kind}: {each.cause}" for each in self.events[-5:]]
                raise RuntimeError(f"not so: {what}; {newest}\n{log[-4000:]}")
            await asyncio.sleep(_LOOK_SECONDS)
        return time.monotonic() - began

    async def steps_follow(self, number: int = 2) -> float:
        """Seconds until so many more steps are done."""
        last = len(self.steps) + number
        return await self.until(f"step {last}", lambda: len(self.steps) >= last)

    async def set_replicas(self, number: int) -> None:
        """As `seamflow set-replicas` does. Raises `UnavailableError` while the trainer is away."""
        async with connect(self._address("trainer")) as channel:
            stub = async_stub(TrainerServiceStub, channel)
            try:
                await stub.SetReplicas(trainer_pb.SetReplicasRequest(replicas=number))
            except grpc.aio.AioRpcError as error:
                raise decode(error) from error

    async def finish(self) -> None:
        """Let the step in progress be the last one, and wait for the summary."""
        async with connect(self._address("trainer")) as channel:
            stub = async_stub(TrainerServiceStub, channel)
            await stub.FinishTraining(trainer_pb.FinishTrainingRequest())
        await self.until("the end", lambda: (self.run / "summary.json").exists())
        await asyncio.to_thread(self.launcher.wait, _END_SECONDS)

    async def watch(self) -> None:
        """Follow the audit log, across deaths of the scheduler."""
        while True:
            with suppress(grpc.aio.AioRpcError):
                async with connect(self._address("scheduler")) as channel:
                    stub = async_stub(SchedulerServiceStub, channel)
                    last = self.events[-1].sequence if self.events else 0
                    request = scheduler_pb.WatchAllocationsRequest(after_sequence=last)
                    async for response in stub.WatchAllocations(request):
                        self.events.extend(response.events)
            await asyncio.sleep(_LOOK_SECONDS)

    def _address(self, service: str) -> str:
        found: dict[str, str] = json.loads((self.run / "addresses.json").read_text())
        return found[service]


def lines(file: Path) -> Sequence[dict[str, Any]]:
    """Complete rows of a file of JSON lines; none if it is not there."""
    if not file.exists():
        return []
    return [
        json.loads(line) for line in file.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def pace_file(folder: Path) -> Path:
    """Of a job in `folder`."""
    return folder / "pace"


@asynccontextmanager
async def running_job(
    folder: Path, settings: Sequence[str] = (), *, row_seconds: float = 0.2
) -> AsyncIterator[RunningJob]:
    """A job whose scheduler answers; it is ended with all its processes."""
    pace_file(folder).write_text("0")
    (folder / "run.toml").write_text(_CONFIG)
    with _launched(folder, settings, row_seconds) as launcher:
        job = RunningJob(launcher, folder)
        await job.until("a first step", lambda: bool(job.steps))
        watching = asyncio.create_task(job.watch())
        try:
            yield job
        finally:
            watching.cancel()


@contextmanager
def _launched(
    folder: Path, settings: Sequence[str], row_seconds: float
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "services.launcher", "--config", str(folder / "run.toml")]
    command += ["--runs-folder", str(folder / "runs"), *(f"--set={each}" for each in settings)]
    own = {PACE_FILE: str(pace_file(folder)), ROW_SECONDS: str(row_seconds)}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", **own}
    with (folder / "terminal.log").open("wb") as log:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        yield launcher
    finally:
        launcher.terminate()
        try:
            launcher.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def conserved(job: RunningJob) -> dict[str, float]:
    """What the run's own records say, once it has ended: how much it was, and what must be 0."""
    summary = json.loads((job.run / "summary.json").read_text())
    trained = lines(job.run / "trained_samples.jsonl")
    steps = [line["step"] for line in trained]
    samples = [name for line in trained for name in line["sample_ids"]]
    expected = set(range(1, summary["optimizer_steps"] + 1))
    return {
        "optimizer_steps": summary["optimizer_steps"],
        "tokens_received": summary["tokens_received_by_agents"],
        "tokens_lost": summary["tokens_lost"] + summary["tokens_with_wrong_version"],
        "tokens_duplicated": summary["tokens_duplicated"],
        "samples_trained": len(samples),
        "samples_trained_twice": len(samples) - len(set(samples)),
        "steps_lost_or_doubled": len(expected ^ set(steps)) + len(steps) - len(set(steps)),
        "rollouts_failed": summary["failed_rollouts"],
        "process_restarts": summary["process_restarts"],
    }
