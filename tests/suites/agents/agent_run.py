"""A training run whose agent is `sdk_agent` beside it, with processes killed while it trains."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.inspect.run_files import read_steps
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher import redis_server
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, free_ports
from services.launcher.process_plan import plan
from services.launcher.report.summary import trajectories
from services.launcher.report.view import View
from services.launcher.run import Run
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from tools.provenance import ROOT

CONFIG_FILE = ROOT / "examples" / "openai_agent.toml"
_POLL_SECONDS = 0.1
_ZERO = (
    "calls_failed",
    "turns_not_received",
    "tokens_lost",
    "tokens_duplicated",
    "tokens_with_wrong_version",
    "tokens_reencoded",
)


@dataclass(slots=True)
class Outcome:
    """What the store and the agent's log say of a run."""

    figures: dict[str, float]
    """Counts, by name."""
    errors: list[str]
    """What SDK calls raised."""
    rewards: list[float]
    """Mean reward of each step."""
    problems: list[str] = field(default_factory=list)
    """What should be otherwise."""


@dataclass(slots=True)
class AgentRun(Run):
    """`Run` with kills, and with figures of what agents got, what is stored and what is trained."""

    victims: Sequence[str] = ()
    """Processes to kill, one after each optimizer step."""
    kills: Counter[str] = field(default_factory=Counter)
    outcome: Outcome | None = None

    async def _learn(self, processes: Supervisor, services: Services) -> None:
        killing = asyncio.create_task(self._kill(processes, services))
        try:
            # Without zero-argument super: the class is made anew for its slots.
            await Run._learn(self, processes, services)
            await asyncio.wait_for(killing, 1.0)
        finally:
            killing.cancel()

    async def _kill(self, processes: Supervisor, services: Services) -> None:
        last = 0
        for name in self.victims:
            status = await services.trainer_status()
            while status is None or status.step <= last:
                await asyncio.sleep(_POLL_SECONDS)
                status = await services.trainer_status()
            last = status.step
            processes.kill(name)
            self.kills[name.partition("-")[0]] += 1
            print(f"killed {name} after step {last}", file=sys.stderr)

    async def _summarize(self, processes: Supervisor, services: Services, *args: Any) -> Any:
        summary = await Run._summarize(self, processes, services, *args)
        stored = [trajectory async for trajectory in trajectories(services)]
        samples = await _samples(services)
        calls = _lines(self.layout.folder / "calls.jsonl")
        steps = read_steps(self.layout.folder / "metrics.jsonl")
        self.outcome = _outcome(summary, stored, samples, calls, steps)
        self.outcome.figures["calls_repeated_by_sdks"] = len(
            _lines(self.layout.folder / "retries.jsonl")
        )
        self.outcome.figures |= {f"kills_{name}": n for name, n in self.kills.items()}
        return summary


def make_run(
    folder: Path,
    *,
    forms: Sequence[str],
    victims: Sequence[str] = (),
    http_gateway: str = "rollout.http_gateway",
    num_steps: int | None = None,
    **settings: Any,
) -> AgentRun:
    """A run in `folder`, with calls of these forms; `settings` replace those of the launcher."""
    given = tomllib.loads(CONFIG_FILE.read_text(encoding="utf-8"))["launcher"]
    command = shlex.join([sys.executable, "-m", "tests.suites.agents.sdk_agent"])
    config = LauncherConfig(**{**given, "agent_command": command, "live": False, **settings})
    folder.mkdir(parents=True, exist_ok=True)
    ports = free_ports(config)
    layout = Layout(
        folder=folder,
        run_id=config.name,
        config_file=CONFIG_FILE,
        ports=ports,
        redis_url=f"redis://127.0.0.1:{ports['redis']}",
    )
    plans = {"redis": redis_server.server_plan(config, folder, ports["redis"])}
    plans |= plan(config, layout)
    log = {"FORMS": ",".join(forms), "LOG_FOLDER": str(folder)}
    agent = plans["agent"]
    plans["agent"] = replace(agent, environment={**agent.environment, **log})
    for name in [name for name in plans if name.startswith("http_gateway")]:
        command_line = [
            http_gateway if part == "rollout.http_gateway" else part for part in plans[name].command
        ]
        plans[name] = replace(plans[name], command=tuple(command_line))
    if num_steps is not None:
        steps = {"SEAMFLOW_TRAINER_NUM_STEPS": str(num_steps)}
        trainer = plans["trainer"]
        plans["trainer"] = replace(trainer, environment={**trainer.environment, **steps})
    # A killed process starts again at once, however often it is killed.
    supervisor = partial(Supervisor, stable_seconds=0.0)
    return AgentRun(config, layout, plans, View(), supervisor=supervisor, victims=victims)


def _outcome(
    summary: dict[str, Any],
    stored: Sequence[trajectory_pb2.Trajectory],
    samples: Sequence[sample_pb.ListedSample],
    calls: Sequence[dict[str, Any]],
    steps: Sequence[dict[str, float]],
) -> Outcome:
    finished = {t.rollout_id: t for t in stored if t.state == trajectory_pb2.ROLLOUT_STATE_FINISHED}
    answered = {(c["rollout_id"], c["turn_id"]): c["num_tokens"] for c in calls if "turn_id" in c}
    turns = {(t.rollout_id, turn.turn_id): turn for t in finished.values() for turn in t.turns}
    trained = [s.sample for s in samples if s.committed_step and not s.sample.replayed]
    figures = {
        "optimizer_steps": summary["optimizer_steps"],
        "weight_updates": summary["weight_updates"],
        "heldout_before": summary["heldout_before"],
        "heldout_after": summary["heldout_after"],
        "calls_answered": len(answered),
        "calls_failed": sum("error" in call for call in calls),
        "rollouts_finished": len(finished),
        "rollouts_replaced": len(stored) - len(finished),
        # Of turns that an agent got, or did not get: each way a token may differ.
        "turns_not_received": len(turns.keys() - answered.keys()),
        "tokens_received": sum(answered.values()),
        "tokens_lost": summary["tokens_lost"] + _missing(answered, turns),
        "tokens_duplicated": summary["tokens_duplicated"] + _surplus(answered, turns),
        "tokens_with_wrong_version": summary["tokens_with_wrong_version"],
        "tokens_reencoded": sum(_reencoded(t.turns) for t in finished.values()),
        "tokens_trained": sum(sum(sample.loss_mask) for sample in trained),
        "tokens_sampled": sum(
            _sampled(turn)
            for name in {sample.rollout_id for sample in trained}
            for turn in finished[name].turns
        ),
        "tokens_of_trainer": sum(step["num_tokens"] for step in steps),
        "seconds": summary["seconds_total"],
    }
    errors = [call["error"] for call in calls if "error" in call]
    outcome = Outcome(figures, errors, [step["reward_mean"] for step in steps])
    outcome.problems = _problems(figures)
    common = Counter(str(error)[:300] for error in errors).most_common(3)
    outcome.problems += [f"{number} calls ended with {error}" for error, number in common]
    return outcome


def _problems(figures: dict[str, float]) -> list[str]:
    found = [f"{name} is {figures[name]:g}" for name in _ZERO if figures[name]]
    same = ("tokens_trained", "tokens_sampled", "tokens_of_trainer")
    if len({figures[name] for name in same}) > 1:
        found.append(", ".join(f"{name} {figures[name]:g}" for name in same))
    return found


def _sampled(turn: trajectory_pb2.Turn) -> int:
    spans = turn.tokens.spans
    return sum(s.num_tokens for s in spans if s.origin == tokens_pb2.ORIGIN_POLICY)


def _missing(
    answered: dict[tuple[str, str], int], turns: dict[tuple[str, str], trajectory_pb2.Turn]
) -> int:
    """Tokens of answers that the record of their turn lacks."""
    return sum(max(0, answered[n] - _sampled(t)) for n, t in turns.items() if n in answered)


def _surplus(
    answered: dict[tuple[str, str], int], turns: dict[tuple[str, str], trajectory_pb2.Turn]
) -> int:
    """Tokens that the record has beyond the answers."""
    return sum(max(0, _sampled(t) - answered[n]) for n, t in turns.items() if n in answered)


def _reencoded(turns: Sequence[trajectory_pb2.Turn]) -> int:
    """Recorded tokens that the next turn does not continue; each turn follows another."""
    number = 0
    for before, turn in pairwise(turns):
        whole = before.prefix_length + len(before.tokens.token_ids)
        shared = turn.prefix_length if turn.prefix_turn_id == before.turn_id else 0
        number += whole - shared
    return number


async def _samples(services: Services) -> list[sample_pb.ListedSample]:
    found: list[sample_pb.ListedSample] = []
    token = ""
    while True:
        request = sample_pb.ListSamplesRequest(run_id=services.run_id, page_token=token)
        page = await services.samples.ListSamples(request)
        found += page.samples
        token = page.next_page_token
        if not token:
            return found


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
