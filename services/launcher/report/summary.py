"""Statistics of a run from its recorded data, and the summary as people read it."""

from __future__ import annotations

import json
import platform
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from seamflow.common.v1 import tokens_pb2
from seamflow.inspect.failure_causes import was_stopped
from seamflow.inspect.lives import Period
from seamflow.inspect.progress import WINDOW
from seamflow.pages import pages
from seamflow.retry import retrying
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.launcher.service_clients import Services
from services.lib.evaluation import label_of, shown_mean

_ENDED = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)

_PAGE = 250
_LEARNED = (
    "run",
    "seed",
    "lives",
    "reward_first",
    "reward_last",
    "heldout_metric",
    "heldout_before",
    "heldout_best",
    "heldout_after",
    "heldout_tasks",
    "evaluations",
    "best_step",
    "best_checkpoint",
    "best_note",
    "pass_at_1_before",
    "pass_at_1_after",
    "success_rule",
    "trained_tokens_per_second",
    "health",
    "failures",
)
_OF_THIS_LIFE = ("processes_given_up", "ranker_turns_learned", "ranker_recall", "cores_busy")


@dataclass(slots=True)
class TrajectoryFigures:
    """Counts over recorded trajectories, added one by one."""

    stops: Sequence[Period] = ()
    """In which what fails was cut off."""
    num_rollouts: int = 0
    """Rollouts that finished with rewards."""
    num_turns: int = 0
    tokens_recorded: int = 0
    """Sampled tokens in the store."""
    turns_interrupted: int = 0
    """Turns whose tokens come from at least two weight versions or two servers."""
    turns_resumed: int = 0
    """Of those, turns that were completed."""
    failed_rollouts: int = 0
    """Rollouts that failed and were replaced."""
    infrastructure_failures: int = 0
    """Of those, rollouts that failed because a process, machine or network broke."""
    cancelled_rollouts: int = 0
    """Rollouts that a stop, the end of the run, or the end of their group cut off."""
    min_turns_per_rollout: int = 0
    turn_lengths: dict[str, list[int]] = field(default_factory=dict)
    """Sampled tokens per turn, by the evaluation the rollout belongs to ("" for training)."""
    rollout_lengths: dict[str, list[int]] = field(default_factory=dict)

    def add(self, trajectory: trajectory_pb2.Trajectory) -> None:
        lengths = [self._add_turn(turn) for turn in trajectory.turns]
        if trajectory.HasField("failure"):
            kind = trajectory.failure.failure_class
            is_failed = not was_stopped(trajectory, self.stops)
            self.failed_rollouts += is_failed
            self.cancelled_rollouts += not is_failed
            is_ours = kind == tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
            self.infrastructure_failures += is_failed and is_ours
        if trajectory.state != trajectory_pb2.ROLLOUT_STATE_FINISHED:
            return
        fewest = self.min_turns_per_rollout if self.num_rollouts else len(lengths)
        self.min_turns_per_rollout = min(fewest, len(lengths))
        self.num_rollouts += 1
        label = evaluation_of(trajectory)
        self.turn_lengths.setdefault(label, []).extend(lengths)
        self.rollout_lengths.setdefault(label, []).append(sum(lengths))

    def _add_turn(self, turn: trajectory_pb2.Turn) -> int:
        sampled = [s for s in turn.tokens.spans if s.origin == tokens_pb2.ORIGIN_POLICY]
        is_cut = (
            len({s.weight_version for s in sampled}) > 1 or len({s.server_id for s in sampled}) > 1
        )
        num_tokens = sum(span.num_tokens for span in sampled)
        self.num_turns += 1
        self.tokens_recorded += num_tokens
        self.turns_interrupted += is_cut
        self.turns_resumed += is_cut and turn.finish_reason in _ENDED
        return num_tokens


def evaluation_of(trajectory: trajectory_pb2.Trajectory) -> str:
    """ "before", "after" or "step-N" for a held-out rollout, "" for one of training."""
    if trajectory.purpose != tokens_pb2.PURPOSE_EVAL:
        return ""
    return label_of(trajectory.group_id)


def tail_ratio(lengths: Sequence[int]) -> float:
    """99th percentile over median; 0 without data."""
    if len(lengths) < 2:
        return 0.0
    return statistics.quantiles(lengths, n=100)[98] / max(statistics.median(lengths), 1)


def num_weight_updates(steps: Iterable[Mapping[str, Any]]) -> int:
    """Distinct versions that the steps began to publish.

    The line of a step that was restored from a checkpoint has no version: it was written before.
    """
    return len({step.get("weight_version", 0) for step in steps} - {0})


def package_versions() -> dict[str, str]:
    """Of Python and of the packages that a run's results depend on."""
    packages = ("seamflow", "torch", "transformers", "grpcio", "protobuf", "redis")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


async def trajectories(
    services: Services, *, headers_only: bool = False
) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """All recorded trajectories of the run, oldest first."""
    token = ""
    while True:
        request = pb.ListTrajectoriesRequest(
            run_id=services.run_id,
            page_size=_PAGE,
            page_token=token,
            headers_only=headers_only,
        )
        page = await retrying(lambda: services.trajectories.ListTrajectories(request))  # noqa: B023
        for trajectory in page.trajectories:
            yield trajectory
        token = page.next_page_token
        if not token:
            return


async def dead_letters(services: Services) -> AsyncIterator[task_pb.DeadLetter]:
    """All of the run, oldest first."""
    request = task_pb.ListDeadLettersRequest(run_id=services.run_id, page_size=1000)
    async for page in pages(services.tasks.ListDeadLetters, request):
        for letter in page.dead_letters:
            yield letter


def show_summary(summary: Mapping[str, Any], folder: Path, console: Console | None = None) -> None:
    """Print it. Lines with paths are never cut, however narrow the terminal is."""
    console = console or Console()
    console.print(_table(f"run {summary['run']}", dict(_learned(summary))))
    for line in _sentences(summary):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    since = f", since start {summary['lives']}" if summary["lives"] > 1 else ""
    counters = {
        name + since * (name in _OF_THIS_LIFE): value
        for name, value in summary.items()
        if name not in _LEARNED
    }
    console.print(_table("services" + (", over all lives" if since else ""), counters))
    if summary["mechanisms"]:
        console.print(_table("how often mechanisms acted", summary["mechanisms"]))
    if summary["nodes"]:
        console.print(_nodes(summary["nodes"], since))
    console.print(f"summary, pictures and logs: {folder}", soft_wrap=True, highlight=False)


def _learned(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if summary["reward_first"] is not None:
        first, last = summary["reward_first"], summary["reward_last"]
        window = max(1, min(WINDOW, summary["optimizer_steps"] // 2))
        if last is None:
            yield "mean reward of the only step", f"{first:.3f}"
        else:
            yield f"mean reward, first → last {window} steps", f"{first:.3f} → {last:.3f}"
    if summary["heldout_before"] is not None:
        metric = summary["heldout_metric"]
        before, best, after = (
            shown_mean(summary[f"heldout_{name}"], metric) for name in ("before", "best", "after")
        )
        yield (
            f"held-out {metric}, {summary['heldout_tasks']} tasks",
            f"{before} before → best {best} at step {summary['best_step']} → {after} after",
        )
    if summary["pass_at_1_after"] is not None and summary["heldout_metric"] != "success":
        rates = (summary[f"pass_at_1_{name}"] for name in ("before", "after"))
        before, after = (shown_mean(rate, "pass@1") for rate in rates)
        yield f"held-out pass@1 ({summary['success_rule']})", f"{before} before → {after} after"
    if summary["trained_tokens_per_second"] is not None:
        period = "of training, waiting included, in all lives"
        yield f"trained tokens per second {period}", f"{summary['trained_tokens_per_second']:,.0f}"


def _sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["best_checkpoint"]:
        yield f"best checkpoint: {summary['best_checkpoint']}"
    elif summary["best_note"]:
        yield summary["best_note"]
    steps, updates = summary["optimizer_steps"], summary.get("weight_updates")
    if updates is not None and updates != steps:
        yield (
            f"weights were published {updates} times in {steps} optimizer steps: publish.every is "
            "above 1, or a publish was postponed to the next step"
        )
    yield from (f"health: {line}" for line in summary["health"])
    yield from summary["failures"]


def _table(title: str, rows: Mapping[str, Any]) -> Table:
    table = Table(title=title, show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, value in rows.items():
        if value not in (None, "") and not isinstance(value, dict):
            table.add_row(name, str(value))
    return table


def _nodes(nodes: Mapping[str, Mapping[str, Any]], since: str) -> Table:
    """A row per node: shares of its time during training, and mean seconds of its switches."""
    activities = sorted({name for node in nodes.values() for name in node} - {"switch_seconds"})
    tags = sorted({tag for node in nodes.values() for tag in node["switch_seconds"]})
    table = Table(
        title=f"nodes during training{since}, by a look a second: share of time at work (waiting "
        "counts as idle)"
    )
    heads = (f"switch to {tag}, s" if tag else "release, s" for tag in tags)
    for column in ("node", *activities, *heads):
        table.add_column(column, justify="left" if column == "node" else "right", overflow="fold")
    for name, node in nodes.items():
        seconds = (node["switch_seconds"].get(tag) for tag in tags)
        table.add_row(
            name,
            *(f"{node.get(activity, 0.0):.1%}" for activity in activities),
            *("–" if each is None else f"{each:.3f}" for each in seconds),
        )
    return table


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token: its id and the weights that sampled it."""

    token_id: int
    weight_version: int


Received = dict[tuple[str, str], dict[int, list[Token]]]
"""(rollout_id, turn_id) -> offset -> every token received there."""


@dataclass(slots=True)
class Audit:
    """Result of an audit."""

    num_received: int = 0
    """Tokens the agents have received, at distinct offsets."""
    num_lost: int = 0
    """Received, but missing or different in the store."""
    num_duplicated: int = 0
    """Received twice at one offset, or stored beyond the last token that the agent received.

    The rest of a turn that an agent abandoned is neither: its rollout has failed.
    """
    num_wrong_version: int = 0
    """Stored with another weight version than received."""


def audit_figures(log: Path, stored: Iterable[trajectory_pb2.Trajectory]) -> dict[str, Any]:
    """The result for a summary; null where the agent kept no log, as only the runner does."""
    done = audit(read_token_log(log), stored) if log.exists() else None
    return {
        "token_audit": "done" if done else "not audited: the agent kept no log of its tokens",
        "tokens_received_by_agents": done and done.num_received,
        "tokens_lost": done and done.num_lost,
        "tokens_duplicated": done and done.num_duplicated,
        "tokens_with_wrong_version": done and done.num_wrong_version,
    }


def read_token_log(path: Path) -> Received:
    """Read the agents' log; the incomplete last line of a killed runner is skipped."""
    received: Received = defaultdict(lambda: defaultdict(list))
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            chunk = json.loads(line)
        except json.JSONDecodeError:
            continue
        turn = received[chunk["rollout_id"], chunk["turn_id"]]
        versions = [v for _, num, v, _ in chunk["spans"] for _ in range(num)]
        tokens = zip(chunk["token_ids"], versions, strict=True)
        for i, (token_id, weight_version) in enumerate(tokens):
            turn[chunk["offset"] + i].append(Token(token_id, weight_version))
    return received


def audit(received: Received, stored: Iterable[trajectory_pb2.Trajectory]) -> Audit:
    result = Audit()
    turns = {(t.rollout_id, turn.turn_id): (t, turn) for t in stored for turn in t.turns}
    for name, tokens in received.items():
        found = turns.get(name)
        _compare(result, tokens, found[1] if found else None)
        if found and found[0].state != trajectory_pb2.ROLLOUT_STATE_FAILED:
            result.num_duplicated += _num_beyond(tokens, found[1])
    return result


def _compare(
    result: Audit, received: dict[int, list[Token]], turn: trajectory_pb2.Turn | None
) -> None:
    kept = _sampled(turn) if turn is not None else []
    result.num_received += len(received)
    for offset, seen in received.items():
        result.num_duplicated += len(seen) - 1
        if offset >= len(kept) or kept[offset].token_id != seen[0].token_id:
            result.num_lost += 1
        elif kept[offset].weight_version != seen[0].weight_version:
            result.num_wrong_version += 1


def _num_beyond(received: dict[int, list[Token]], turn: trajectory_pb2.Turn) -> int:
    """Tokens of a turn that has ended after the agent's last one: they were stored twice."""
    if not turn.finish_reason or not received:
        return 0
    return max(0, len(_sampled(turn)) - max(received) - 1)


def _sampled(turn: trajectory_pb2.Turn) -> list[Token]:
    return [
        Token(token_id, span.weight_version)
        for span in turn.tokens.spans
        if span.origin == tokens_pb2.ORIGIN_POLICY
        for token_id in turn.tokens.token_ids[span.start : span.start + span.num_tokens]
    ]
