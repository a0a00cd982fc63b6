"""One training run of foreign agents, some of whose processes are killed while it trains."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import psutil
from seamflow.common.v1 import tokens_pb2
from seamflow.inspect.run_files import read_steps
from seamflow.retry import retrying
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2

from bench.clients.foreign_agents import COMMANDS, Said, read_summary
from services.launcher import redis_server
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, free_ports
from services.launcher.process_plan import plan
from services.launcher.report.summary import Audit, audit, read_token_log, trajectories
from services.launcher.run_rules import rules
from services.launcher.service_clients import Services, connected
from services.launcher.supervisor import Supervisor

CONFIG_FILE = Path(__file__).parent / "training.toml"
VICTIMS = ("rollout_gateway", "trajectory_manager", "rollout_server-node-a")
"""Killed in turn."""
_TOKENS_BETWEEN_KILLS = 320
_NUM_EVALUATIONS = 4
"""Of each client that evaluates."""
_LAST_PROCESSES = ("agent_runner", "dataloader")
_POLL_SECONDS = 0.1


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    audit: Audit
    """Tokens that the Node agent received, next to the record."""
    kills: Counter[str]
    """Processes killed while it trained, by name."""
    stored: list[trajectory_pb2.Trajectory]
    """Every recorded rollout."""
    steps: list[dict[str, float]]
    """The trainer's record of each step."""
    said: dict[str, Said]
    """What the clients printed at their end."""

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return [step["reward_mean"] for step in self.steps]

    def states(self) -> Counter[int]:
        """Recorded rollouts by state."""
        return Counter(rollout.state for rollout in self.stored)

    def problems(self) -> list[str]:
        """What should be otherwise; empty: nothing."""
        counts = {
            "lost": self.audit.num_lost,
            "doubled": self.audit.num_duplicated,
            "of a wrong version": self.audit.num_wrong_version,
        }
        found = [f"{number} tokens {what}" for what, number in counts.items() if number]
        wrong = {name: said for name, said in self.said.items() if not said.is_right()}
        return found + [f"the {name} client said {said}" for name, said in wrong.items()]


class TokensReceived:
    """Counts the tokens in a token log that grows."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = self.number = 0

    def update(self) -> int:
        """Read what was added; returns the number of all tokens."""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    self.number += len(json.loads(line)["token_ids"])
        return self.number


class RunWithKills:
    """A run on this machine, from its first process to the audit of its tokens."""

    def __init__(self, folder: Path, *, num_kills: int, seed: int) -> None:
        """`folder` holds `prepared/`, and gets everything else."""
        settings = tomllib.loads(CONFIG_FILE.read_text(encoding="utf-8"))["launcher"]
        self._config = LauncherConfig(**settings, seed=seed)
        self._folder, self._num_kills = folder, num_kills
        ports = free_ports(self._config)
        self._layout = Layout(
            folder=folder,
            run_id=self._config.name,
            config_file=CONFIG_FILE,
            ports=ports,
            redis_url=f"redis://127.0.0.1:{ports['redis']}",
        )
        self._logs = folder / "logs"
        self._token_log = folder / "received.jsonl"
        self._kills = Counter[str]()
        for made in (self._logs, folder / "redis"):
            made.mkdir()
        self._token_log.touch()

    async def train(self) -> Outcome:
        """Train until all kills are done and a last step is made; returns what came of it.

        Raises `ChildFailed` for a process that cannot run.
        """
        async with (
            Supervisor(self._logs) as processes,
            connected(self._config, self._layout) as services,
        ):
            working = asyncio.create_task(self._train(processes, services))
            failing = asyncio.create_task(processes.failure())
            await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
            failing.cancel()
            if not working.done():
                working.cancel()
                failing.result()
            return await working

    async def _train(self, processes: Supervisor, services: Services) -> Outcome:
        plans = plan(self._config, self._layout)
        await self._start_services(processes, services, plans)
        await self._evaluate(processes, services)
        await processes.start(self._agent("node"))
        await processes.start(plans["dataloader"])
        await self._kill(processes)
        await retrying(lambda: services.trainer.FinishTraining(trainer_pb.FinishTrainingRequest()))
        await self._until_trained(services)
        await processes.stop("dataloader")
        request = run_pb.EndRunRequest(run_id=self._layout.run_id)
        await retrying(lambda: services.runs.EndRun(request))
        for name in COMMANDS:
            await processes.finished(f"agent-{name}")
        return await self._outcome(services)

    async def _start_services(
        self, processes: Supervisor, services: Services, plans: dict[str, ProcessPlan]
    ) -> None:
        layout = self._layout
        redis = redis_server.server_plan(self._config, layout.folder, layout.ports["redis"])
        await processes.start(redis)
        await redis_server.wait_for_store(layout.redis_url)
        await processes.start(plans["trajectory_manager"])
        request = run_pb.CreateRunRequest(run_id=layout.run_id, config=rules(self._config))
        await retrying(lambda: services.runs.CreateRun(request))
        for name in plans:
            if name not in ("trajectory_manager", *_LAST_PROCESSES):
                await processes.start(plans[name])

    def _agent(self, name: str) -> ProcessPlan:
        target = (self._layout.address("rollout_gateway"), self._layout.run_id)
        environment = {"TOKEN_LOG": str(self._token_log)} if name == "node" else {}
        return ProcessPlan(
            name=f"agent-{name}",
            command=(*COMMANDS[name], *target),
            environment=environment,
            restarts=False,
        )

    async def _evaluate(self, processes: Supervisor, services: Services) -> None:
        """Let each client that evaluates play; it stays until the run ends."""
        async with grpc.aio.insecure_channel(self._layout.address("rollout_gateway")) as gateway:
            await gateway.channel_ready()
        waiting = list[psutil.Process]()
        for number, name in enumerate(sorted(COMMANDS.keys() - {"node"})):
            for process in waiting:
                process.suspend()  # so that the next client gets tasks too
            await processes.start(self._agent(name))
            tasks = [
                trajectory_pb2.Task(task_id=f"{name}-{each}", purpose=tokens_pb2.PURPOSE_EVAL)
                for each in range(_NUM_EVALUATIONS)
            ]
            request = task_pb.SubmitTasksRequest(run_id=self._layout.run_id, tasks=tasks)
            await retrying(partial(services.tasks.SubmitTasks, request))
            # Each call for work that waits of a suspended client takes a task.
            await self._until_finished(services, (number + 1) * _NUM_EVALUATIONS - len(waiting))
            for process in waiting:
                process.resume()
            await self._until_finished(services, (number + 1) * _NUM_EVALUATIONS)
            waiting += [
                child
                for child in psutil.Process().children()
                if child.cmdline()[: len(COMMANDS[name])] == list(COMMANDS[name])
            ]

    async def _until_finished(self, services: Services, number: int) -> None:
        finished = 0
        while finished < number:
            await asyncio.sleep(_POLL_SECONDS)
            known = [each async for each in trajectories(services, headers_only=True)]
            finished = sum(r.state == trajectory_pb2.ROLLOUT_STATE_FINISHED for r in known)

    async def _kill(self, processes: Supervisor) -> None:
        received, last = TokensReceived(self._token_log), 0
        for name in itertools.islice(itertools.cycle(VICTIMS), self._num_kills):
            # So many tokens also show that the process killed before serves again.
            while received.update() < last + _TOKENS_BETWEEN_KILLS:
                await asyncio.sleep(_POLL_SECONDS)
            last = received.number
            processes.kill(name)
            self._kills[name] += 1
            print(f"killed {name} after {last} tokens", file=sys.stderr)

    async def _until_trained(self, services: Services) -> None:
        status = None
        while status is None or status.state != trainer_pb.TRAINER_STATE_FINISHED:
            await asyncio.sleep(_POLL_SECONDS)
            status = await services.trainer_status() or status

    async def _outcome(self, services: Services) -> Outcome:
        stored = [trajectory async for trajectory in trajectories(services)]
        return Outcome(
            audit=audit(read_token_log(self._token_log), stored),
            kills=self._kills,
            stored=stored,
            steps=read_steps(self._folder / "metrics.jsonl"),
            said={name: read_summary(self._logs / f"agent-{name}.log") for name in COMMANDS},
        )
