"""Entry point: `python -m services.evaluator`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from seamflow.evaluator.v1 import evaluator_service_pb2 as pb
from seamflow.evaluator.v1.evaluator_service_pb2_grpc import (
    EvaluatorServiceServicer,
    add_EvaluatorServiceServicer_to_server,
)

from services.chassis.errors import ConfigError, invalid_argument, not_found
from services.chassis.rpc.fields import message_of
from services.chassis.rpc.server import Service, run
from services.evaluator.clients import TrainerClient, connected
from services.evaluator.config import EvaluatorConfig
from services.evaluator.evaluation import Evaluation
from services.evaluator.evaluator import Evaluator
from services.evaluator.heldout_tasks import heldout_tasks
from services.lib.evaluation import EvaluationLine

Context = grpc.aio.ServicerContext[Any, Any]

_MOST_LINES = 100


class EvaluatorServicer(EvaluatorServiceServicer):
    """Answers from the evaluation log; never waits for an evaluation."""

    def __init__(self, run_id: str, evaluator: Evaluator) -> None:
        self._run_id, self._evaluator = run_id, evaluator

    async def GetEvaluations(  # noqa: N802 -- named by the contract
        self, request: pb.GetEvaluationsRequest, context: Context
    ) -> pb.GetEvaluationsResponse:
        """State, results, and notes beyond those that the caller knows."""
        self._check_run(request.run_id)
        known = request.num_known_notes
        if known < 0:
            raise invalid_argument("num_known_notes", known, "must be at least 0")
        evaluator, best = self._evaluator, self._evaluator.log.best
        notes = evaluator.notes
        return pb.GetEvaluationsResponse(
            state=evaluator.state,
            evaluations=map(_evaluation, _of_most(evaluator.log.lines)),
            best=None if best is None else _evaluation(best),
            num_done=evaluator.evaluation.num_done,
            num_rollouts=evaluator.evaluation.num_rollouts,
            stopped_early=evaluator.stopped_early,
            notes=notes[known if known <= len(notes) else 0 :],
            num_notes=len(notes),
        )

    async def FinishEvaluations(  # noqa: N802 -- named by the contract
        self, request: pb.FinishEvaluationsRequest, context: Context
    ) -> pb.FinishEvaluationsResponse:
        self._check_run(request.run_id)
        self._evaluator.finish()
        return pb.FinishEvaluationsResponse()

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise not_found("evaluator of run", run_id)


def _of_most(lines: Sequence[EvaluationLine]) -> Sequence[EvaluationLine]:
    """All, or the first and the newest."""
    if len(lines) <= _MOST_LINES:
        return lines
    return [lines[0], *lines[1 - _MOST_LINES :]]


def _evaluation(line: EvaluationLine) -> pb.Evaluation:
    low, high = line.interval or (None, None)
    return message_of(
        pb.Evaluation,
        line,
        low=low,
        high=high,
        checkpoint=line.checkpoint or "",
        smaller_is_better=line.goal == "min",
        abandoned=line.abandoned or "",
    )


def main() -> None:
    """Evaluate until the run is over, and answer until SIGTERM."""
    run("evaluator", EvaluatorConfig, build)


@asynccontextmanager
async def build(config: EvaluatorConfig) -> AsyncIterator[Service]:
    """Read the held-out tasks and what was evaluated so far; open the channels."""
    _make_folder(config.folder)
    tasks = await heldout_tasks(config)
    async with connected(config) as clients:
        evaluation = Evaluation(config, clients, tasks)
        evaluator = Evaluator(config, clients, evaluation, TrainerClient(clients))
        servicer = EvaluatorServicer(config.run_id, evaluator)
        yield Service(
            servicers=[(add_EvaluatorServiceServicer_to_server, servicer)],
            background=[evaluator.run],
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"folder {str(folder)!r} cannot be made: {error.strerror}; give one that this process "
            "may write"
        ) from error
