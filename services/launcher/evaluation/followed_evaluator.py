"""Follows the evaluator of a run: shows what it says, and waits for its states."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.evaluator.v1 import evaluator_service_pb2 as pb

from services.launcher.report.view import View

if TYPE_CHECKING:
    from seamflow.evaluator.v1.evaluator_service_pb2_grpc import EvaluatorServiceAsyncStub

_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
AROUND_TRAINING: Mapping[pb.EvaluatorState.ValueType, str] = {
    pb.EVALUATOR_STATE_BEFORE_TRAINING: "held-out tasks before training",
    pb.EVALUATOR_STATE_AFTER_TRAINING: "held-out tasks after training",
}
"""States that are phases of a run: beside training the phase is another one."""
WITHOUT_TRAINING: Mapping[pb.EvaluatorState.ValueType, str] = {
    pb.EVALUATOR_STATE_BEFORE_TRAINING: "held-out tasks",
}
"""Of a model that is evaluated once."""


class FollowedEvaluator:
    """What the evaluator of a run says; the supervisor tells whether it lives."""

    def __init__(
        self,
        evaluator: EvaluatorServiceAsyncStub,
        run_id: str,
        view: View,
        phases: Mapping[pb.EvaluatorState.ValueType, str] = AROUND_TRAINING,
    ) -> None:
        self._evaluator, self._run_id = evaluator, run_id
        self._view, self._phases = view, phases
        self._num_notes, self._shown = 0, pb.EVALUATOR_STATE_UNSPECIFIED
        self._state: pb.EvaluatorState.ValueType = pb.EVALUATOR_STATE_UNSPECIFIED
        self.stopped_early = ""
        """Why it ended training early; empty: it did not."""

    async def until(self, state: pb.EvaluatorState.ValueType) -> None:
        """Follow it until it has reached `state`."""
        while self._state < state:
            await self._look()
            if self._state < state:
                await asyncio.sleep(_LOOK_SECONDS)

    async def finished(self, *, is_asked: bool) -> None:
        """Follow it to its end; `is_asked`: the trainer does not finish by itself."""
        while self._state != pb.EVALUATOR_STATE_FINISHED:
            if is_asked:  # again, as one that is restarted has forgotten it
                await self._ask_to_finish()
            await self._look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def follow(self) -> None:
        """Follow it until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(2 * _LOOK_SECONDS)

    async def _look(self) -> None:
        request = pb.GetEvaluationsRequest(run_id=self._run_id, num_known_notes=self._num_notes)
        try:
            answer = await self._evaluator.GetEvaluations(request, timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError:
            return  # restarting
        for note in answer.notes:
            self._view.note(note)
        self._num_notes, self._state = answer.num_notes, answer.state
        self.stopped_early = answer.stopped_early or self.stopped_early
        self._show(answer)

    def _show(self, answer: pb.GetEvaluationsResponse) -> None:
        """The phase and the bar; beside training the bar shows the steps."""
        phase = self._phases.get(answer.state)
        if phase is None or not answer.num_rollouts:
            return
        if answer.state != self._shown:
            self._shown = answer.state
            self._view.phase(phase)
        self._view.progress(answer.num_done, answer.num_rollouts)

    async def _ask_to_finish(self) -> None:
        request = pb.FinishEvaluationsRequest(run_id=self._run_id)
        try:
            await self._evaluator.FinishEvaluations(request, timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError:
            return  # restarting
