"""`make test-clients`: a training run whose only agent is the Node client, with processes killed.

Gateway, trajectory manager and rollout server are killed in turn while the run trains; every token
that the agent received is then compared with the record. The Go and C++ clients each make a rollout
against the same services before it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from seamflow.trajectory.v1 import trajectory_pb2

from bench.clients.foreign_agents import check_programs
from bench.clients.run_with_kills import Outcome, RunWithKills
from bench.report import Report
from examples.quickstart import task
from examples.quickstart.prepare import WarmStart, build_model, build_tokenizer, warm_start

_WARM_STEPS = 200
_MIN_FLOORS = 8
"""Of a call in these tasks: short turns are over before anything can be killed."""


def main() -> None:
    """Run it and report."""
    parser = argparse.ArgumentParser(prog="bench.clients", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--model", type=Path, help="a prepared quickstart; default: make one")
    parser.add_argument("--folder", type=Path, help="keep logs and records here")
    options = parser.parse_args()
    check_programs()
    with tempfile.TemporaryDirectory(prefix="seamflow-clients-") as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        _prepare(folder / "prepared", options.model, options.seed)
        run = RunWithKills(folder, num_kills=options.kills, seed=options.seed)
        outcome = asyncio.run(run.train())
    _report(outcome, options.seed).publish()
    if problems := outcome.problems():
        sys.exit("; ".join(problems))


def _prepare(folder: Path, model: Path | None, seed: int) -> None:
    """Model and tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        (folder / "model").symlink_to(model.resolve())
    else:
        _make_model(folder / "model", seed)
    lines = [json.dumps({"task_id": f"far-{i}", "payload": p}) for i, p in enumerate(_far(seed))]
    (folder / "tasks-far.jsonl").write_text("\n".join(lines) + "\n")


def _make_model(folder: Path, seed: int) -> None:
    """The quickstart's model, after the first part of its warm start: much is left to learn."""
    torch.set_num_threads(1)  # more wait for each other on so small a model
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer), seed)
    warm_start(model, tokenizer, WarmStart(steps=_WARM_STEPS), seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _far(seed: int) -> Iterable[task.Payload]:
    for payload in task.tasks(seed, 20_000, "train"):
        stops = [payload["start"], *payload["calls"]]
        if min(abs(a - b) for a, b in itertools.pairwise(stops)) >= _MIN_FLOORS:
            yield payload


def _report(outcome: Outcome, seed: int) -> Report:
    states = outcome.states()
    figures = {
        "steps_trained": len(outcome.steps),
        "kills": outcome.kills.total(),
        **{f"kills_{name}": number for name, number in outcome.kills.items()},
        "rollouts": states[trajectory_pb2.ROLLOUT_STATE_FINISHED],
        "rollouts_replaced": states[trajectory_pb2.ROLLOUT_STATE_FAILED],
        "tokens_received": outcome.audit.num_received,
        "tokens_lost": outcome.audit.num_lost,
        "tokens_doubled": outcome.audit.num_duplicated,
        "tokens_of_wrong_version": outcome.audit.num_wrong_version,
        "streams_resumed": outcome.said["node"].resumed,
        "clients_ok": sum(said.is_right() for said in outcome.said.values()),
    }
    return Report(
        bench="clients", figures=figures, raw={"reward_mean": outcome.rewards}, seeds=[seed]
    )


if __name__ == "__main__":
    main()
