"""Answers of the API for chosen rollouts, by the path that a page requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from seamflow.inspect.snapshot import Snapshot
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.bundle.redaction import Redaction
from services.console.sources.run_store import RunStore
from services.console.sources.shown_run import ShownRun
from services.console.views.nodes import ended_history
from services.console.views.overview import overview, run_row
from services.console.views.rows import rollout_row
from services.console.views.step_detail import step_detail
from services.console.views.steps import step_curves
from services.console.views.token_window import MAX_TOKENS, token_window
from services.console.views.transcript import transcript

Values = dict[str, Any]


async def recorded_answers(
    run: ShownRun, store: RunStore, rollout_ids: Sequence[str], redaction: Redaction
) -> Values:
    """The run's curves and nodes, and the chosen rollouts with their tokens and steps."""
    run.steps.read()
    own = _path("runs", run.run_id)
    rows = await _rows(store, rollout_ids)
    found: Values = {
        "runs": {"runs": [_without_folder(run_row(run, Snapshot()))]},
        f"{own}/overview": overview(run, Snapshot()),
        f"{own}/steps": step_curves(run, Snapshot(), run.steps.names, 0),
        f"{own}/rollouts": {"rows": rows, "next": None, "searched": len(rows), "total": len(rows)},
        f"{own}/nodes": await ended_history(store, run),
    }
    for step in sorted({row["step"] for row in rows if row["step"]}):
        detail = await step_detail(store, run.steps, step)
        found[f"{own}/steps/{step}"] = _chosen(detail, set(rollout_ids))
    found = redaction.values(found)
    for rollout_id in rollout_ids:
        async for path, answer in _rollout(own, store, rollout_id, redaction):
            found[path] = answer
    return found


def _path(*parts: str) -> str:
    """As encodeURIComponent writes them."""
    return "/".join(quote(part, safe="!'()*") for part in parts)


def _without_folder(row: Values) -> Values:
    return {**row, "live": False, "model": Path(row["model"]).name}


def _chosen(detail: Values, rollout_ids: set[str]) -> Values:
    """Of a step the groups that have a chosen rollout; their others are rows without a text."""
    groups = [
        group
        for group in detail["groups"]
        if any(row["rollout_id"] in rollout_ids for row in group["samples"])
    ]
    return {**detail, "groups": groups}


async def _rows(store: RunStore, rollout_ids: Sequence[str]) -> list[Values]:
    search = pb.SearchRolloutsRequest(rollout_ids=rollout_ids, page_size=1000)
    return [rollout_row(each) for each in (await store.found(search)).rollouts]


async def _rollout(
    own: str, store: RunStore, rollout_id: str, redaction: Redaction
) -> AsyncIterator[tuple[str, Values]]:
    path = f"{own}/{_path('rollouts', rollout_id)}"
    whole = await transcript(store, rollout_id)
    yield path, redaction.values(whole)
    for turn in whole["turns"]:
        tokens = await _tokens(store, rollout_id, turn["turn_id"])
        yield f"{path}/tokens?turn={quote_plus(turn['turn_id'])}", redaction.window(tokens)


async def _tokens(store: RunStore, rollout_id: str, turn_id: str) -> Values:
    """All tokens of a turn's sequence."""
    whole = await token_window(store, rollout_id, turn_id, 0, MAX_TOKENS)
    while len(whole["ids"]) < whole["total"]:
        start = len(whole["ids"])
        part = await token_window(store, rollout_id, turn_id, start, MAX_TOKENS)
        if not part["ids"]:
            break
        for name, values in part.items():
            if isinstance(values, list | str):
                whole[name] += values
    return whole
