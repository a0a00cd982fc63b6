"""The first screen: what the run does, what waits for what, and what speaks against learning."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from seamflow.enum_names import enum_name
from seamflow.evaluator.v1 import evaluator_service_pb2 as evaluator_pb
from seamflow.inspect.diagnosis import Finding, activity, node_state, published
from seamflow.inspect.failure_causes import Cause
from seamflow.inspect.learning import not_learning
from seamflow.inspect.progress import read_progress
from seamflow.inspect.run_files import json_lines
from seamflow.inspect.run_folders import run_state as folder_state
from seamflow.inspect.snapshot import Snapshot
from seamflow.inspect.why_stuck import why_stuck
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.console.sources.shown_runs import ShownRun

_DEFAULT = ("reward_mean",)

Values = dict[str, Any]

_WARNINGS = frozenset(
    {"trainer_alarm", "server_ejected", "rollouts_fail", "columns_fail", "nothing_waits"}
)
"""Rules of why-stuck that describe no waiting."""


def evaluation_points(run: ShownRun, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Step, mean, bounds of its confidence interval and whether it was the best so far."""
    if run.folder is not None and (run.folder / "evaluation.jsonl").is_file():
        return [_of_file(line) for line in json_lines(run.folder / "evaluation.jsonl")]
    said = snapshot.evaluations
    return [] if said is None else [_of_service(line) for line in said.evaluations]


def _of_file(line: dict[str, Any]) -> dict[str, Any]:
    low, high = line.get("interval") or (None, None)
    return _point(
        line.get("step"), line.get("mean"), low, high, line.get("is_best"), line.get("metric")
    )


def _of_service(line: Any) -> dict[str, Any]:
    low, high = (line.low, line.high) if line.HasField("low") else (None, None)
    mean = line.mean if line.HasField("mean") else None
    return _point(line.step, mean, low, high, line.is_best, line.metric)


def _point(step: Any, mean: Any, low: Any, high: Any, is_best: Any, metric: Any) -> dict[str, Any]:
    values = {"step": step, "mean": mean, "low": low, "high": high}
    return {**values, "best": bool(is_best), "metric": metric}


def step_curves(
    run: ShownRun, snapshot: Snapshot, names: Sequence[str], since: int
) -> dict[str, Any]:
    """Values of the metrics `names` in all steps after `since`, and the names of all metrics."""
    table = run.steps
    first = bisect_right(table.steps, since)
    wanted = names or [name for name in _DEFAULT if name in table.names]
    return {
        "steps": table.steps[first:],
        "time": list(table.column("time")[first:]),
        "metrics": {name: list(table.column(name)[first:]) for name in wanted},
        "names": [name for name in table.names if name != "time"],
        "stops": run.stops(),
        "num_steps": snapshot.trainer.num_steps if snapshot.trainer else None,
        "evaluations": [e for e in evaluation_points(run, snapshot) if (e["step"] or 0) > since]
        if since
        else evaluation_points(run, snapshot),
    }


def overview(run: ShownRun, snapshot: Snapshot, failures: Sequence[Cause] = ()) -> Values:
    """All of the screen; a run without services has its end, its signals and its warnings."""
    findings = why_stuck(snapshot) if run.is_live else []
    waits = _waits(run, snapshot, findings)
    warned = [each for each in findings if each.rule in _WARNINGS - {"nothing_waits"}]
    return {
        "state": run_state(run, snapshot),
        "lives": [asdict(life) for life in run.lives()],
        "note": run.note(),
        "activities": list(_activities(snapshot)),
        "waiting": [_wait(each, snapshot) for each in waits],
        "queues": list(_queues(snapshot)),
        "signals": _signals(run, snapshot),
        "warnings": [
            *(_failing(each) for each in failures),
            *(_warning(each) for each in (*_health(run, snapshot), *warned)),
        ],
        "now": snapshot.now,
    }


def run_state(run: ShownRun, snapshot: Snapshot) -> str:
    """running, waiting, finished, stopped, failed or killed."""
    if not run.is_live:
        return "killed" if run.folder is None else folder_state(run.folder)
    state = trainer_pb.TRAINER_STATE_UNSPECIFIED if not snapshot.trainer else snapshot.trainer.state
    if state == trainer_pb.TRAINER_STATE_FINISHED:
        return "finished"
    stuck = any(not each.normal for each in _waits(run, snapshot, why_stuck(snapshot)))
    return "waiting" if stuck and state != trainer_pb.TRAINER_STATE_TRAINING else "running"


def _waits(run: ShownRun, snapshot: Snapshot, findings: Sequence[Finding]) -> list[Finding]:
    """Findings that say what waits, without those that speak against learning."""
    others = _WARNINGS | {finding.rule for finding in _health(run, snapshot)}
    return [each for each in findings if each.rule not in others]


def _health(run: ShownRun, snapshot: Snapshot) -> Sequence[Finding]:
    if snapshot.progress is not None:
        return not_learning(snapshot.progress)
    return not_learning(read_progress(run.folder)) if run.folder is not None else []


def _wait(finding: Finding, snapshot: Snapshot) -> Values:
    error = snapshot.problems.get(finding.subject)
    return {
        "rule": finding.rule,
        "what": finding.sentence,
        "for": finding.subject or None,
        "since": finding.since,
        "attempts": None,
        "last_error": None if error is None else str(error),
        "next_action": finding.cure,
        "normal": finding.normal,
    }


def _warning(finding: Finding) -> Values:
    return {"name": finding.rule, "text": finding.sentence, "cure": finding.cure}


def _failing(cause: Cause) -> Values:
    many = f"{cause.number} of the newest failed rollouts" if cause.number > 1 else "A rollout"
    text = f"{many} failed for this cause and count for nothing: {cause.line}"
    return {"name": "rollouts_fail", "text": text, "cure": cause.cure, "rollout": cause.rollout_id}


def _activities(snapshot: Snapshot) -> Iterator[Values]:
    if snapshot.trainer is not None:
        state = enum_name(trainer_pb.TrainerState, snapshot.trainer.state).lower()
        what = f"{state}, step {snapshot.trainer.step} of {snapshot.trainer.num_steps}"
        yield {"who": "trainer", "what": what, "since": published(snapshot)}
    for node in snapshot.nodes or ():
        yield {"who": node.node_id, "what": f"{activity(node)}, {node_state(node)}", "since": None}
    for server in snapshot.servers:
        if server.info is not None:
            yield {"who": server.info.server_id, "what": _serving(server.info), "since": None}
    if snapshot.evaluations is not None:
        said = snapshot.evaluations
        state = enum_name(evaluator_pb.EvaluatorState, said.state).lower().replace("_", " ")
        done = f", {said.num_done} of {said.num_rollouts} rollouts" if said.num_rollouts else ""
        yield {"who": "evaluator", "what": state + done, "since": None}


def _serving(info: server_pb.GetServerInfoResponse) -> str:
    state = enum_name(server_pb.ServerState, info.state).lower()
    return f"{state} v{info.weight_version}: {info.num_running} turns, {info.num_queued} queued"


def _queues(snapshot: Snapshot) -> Iterator[Values]:
    ready, trainer, manifest = snapshot.readiness, snapshot.trainer, snapshot.manifest
    if ready is not None:
        yield _queue("tasks", ready.num_queued_tasks, None, "tasks")
        yield _queue("rollouts", ready.num_running_rollouts, None, "rollouts")
    infos = [server.info for server in snapshot.servers if server.info is not None]
    if infos:
        running = sum(info.num_running + info.num_queued for info in infos)
        yield _queue("turns", running, sum(info.max_running for info in infos), "turns")
    if ready is not None:
        limit = ready.num_running_groups + ready.num_admissible_groups
        yield _queue("groups", ready.num_running_groups, limit, "groups")
        yield _queue("samples", ready.num_ready_groups, ready.groups_per_step, "groups")
    if trainer is not None:
        yield _queue("step", trainer.step, trainer.num_steps, "steps")
        published_version = manifest.weight_version if manifest is not None else 0
        behind = max(trainer.step - published_version, 0)
        yield _queue("publish", behind, None, "versions")


def _queue(name: str, count: int, limit: int | None, unit: str) -> Values:
    return {"name": name, "count": count, "limit": limit, "unit": unit}


def _signals(run: ShownRun, snapshot: Snapshot) -> Values:
    last: Mapping[str, float] = run.steps.last()
    if not last and snapshot.trainer is not None:
        last = dict(snapshot.trainer.metrics)
    results = [each for each in evaluation_points(run, snapshot) if each["mean"] is not None]
    return {
        "reward": last.get("reward_mean"),
        "heldout": results[-1] if results else None,
        "share_equal_groups": last.get("share_equal_groups"),
        "entropy": last.get("entropy"),
        "length": last.get("completion_tokens_mean"),
    }


def run_row(run: ShownRun, snapshot: Snapshot) -> dict[str, Any]:
    """A run in the list; times in Unix seconds, None where nothing is known."""
    newest, found = run.steps.newest(), run.lives()
    results = [each for each in evaluation_points(run, snapshot) if each["best"]]
    return {
        "id": run.run_id,
        "name": run.run_id,
        "note": run.note(),
        "state": run_state(run, snapshot),
        "live": run.is_live,
        "step": int(newest.get("step") or (run.steps.steps[-1] if run.steps.steps else 0)),
        "reward": newest.get("reward_mean"),
        "best_heldout": results[-1]["mean"] if results else None,
        "started": found[0].start if found else None,
        "seconds": sum(life.seconds(snapshot.now) for life in found) if found else None,
        "model": run.model,
        "algorithm": run.algorithm(),
    }
