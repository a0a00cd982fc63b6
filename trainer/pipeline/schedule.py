"""The ranks' lists of actions, planned on rank 0: one plan for each number of micro-batches.

At first every task is taken to last equally long, backward twice as long as forward. The ranks
measure their tasks in the first steps; then all is planned anew with these times. A plan decides
when a gradient is computed, never what it is: the tasks of a stage keep their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import dropwhile
from statistics import fmean

from services.chassis.log import get_logger
from trainer.config import PipelineConfig
from trainer.pipeline.fused_schedule.plan import FusedPlan, fused_plan, serial_orders
from trainer.pipeline.fused_schedule.problem import FORWARD, Orders, Pipeline, Problem, timeline
from trainer.pipeline.interpreter import Action
from trainer.pipeline.layout import POLICY, VALUES, Layout

_PLAN_SECONDS = 2.0
"""CPU seconds of the search for a fused schedule, for each number of micro-batches."""

_WARM_UP, _MEASURED = 1, 3
"""Chunks whose times are ignored, and those whose times are measured after them."""


class Schedules:
    """Plans for a layout."""

    def __init__(self, layout: Layout, config: PipelineConfig, seed: int) -> None:
        self._layout, self._config, self._seed = layout, config, seed
        self._reports: list[Sequence[Mapping[str, float]]] = []
        self._seconds: dict[tuple[int, int, int], float] = {}  # by model, kind, rank
        self._planned: dict[int, list[tuple[Action, ...]]] = {}

    @property
    def least_micro_batches(self) -> int:
        """A critic's replica has one at least."""
        return max(1, self._layout.num_replicas)

    def actions(self, num_micro_batches: int) -> list[tuple[Action, ...]]:
        """Of each rank, for a number of micro-batches."""
        if num_micro_batches == 0:
            return [() for _ in self._layout.ranks[POLICY]]
        if num_micro_batches not in self._planned:
            problem = self.problem(num_micro_batches)
            self._planned[num_micro_batches] = actions_of(self._orders(problem), self._layout)
        return self._planned[num_micro_batches]

    def predictions(self, num_micro_batches: int) -> list[tuple[Action, ...]]:
        """Of each rank: forward tasks alone, critics first, and the policy's last stage gets their
        values.
        """
        replicas, found = self._layout.num_replicas, []
        for rank in self._layout.ranks[POLICY]:
            models = sorted(self._layout.stages_on(rank), reverse=True)
            actions = [
                (model, FORWARD, number)
                for model in models
                for number in range(num_micro_batches)
                if model == POLICY or number % replicas == model - 1
            ]
            if rank == self._layout.ranks[POLICY][-1]:
                actions += [(POLICY, VALUES, number) for number in range(num_micro_batches)]
            found.append(tuple(actions))
        return found

    def report(self, answers: Sequence[Mapping[str, float]]) -> None:
        """Take note of the seconds that the ranks measured for a chunk, by "model.kind"."""
        if len(self._reports) == _WARM_UP + _MEASURED or not all(answers):
            return
        self._reports.append(answers)
        if len(self._reports) == _WARM_UP + _MEASURED:
            self._seconds = _means(self._reports[_WARM_UP:])
            self._planned.clear()

    def problem(self, num_micro_batches: int) -> Problem:
        """What is planned."""
        replicas = self._layout.num_replicas
        counts = [num_micro_batches] + [
            len(range(replica, num_micro_batches, replicas)) for replica in range(replicas)
        ]
        return Problem(
            pipelines=tuple(self._pipeline(model, count) for model, count in enumerate(counts)),
            capacity=self._config.micro_batches_held or float("inf"),
            values=replicas > 0,
        )

    def _pipeline(self, model: int, count: int) -> Pipeline:
        ranks = self._layout.ranks[model]
        forward, backward = (
            tuple(self._seconds.get((model, kind, rank), 1.0 + kind) for rank in ranks)
            for kind in (0, 1)
        )
        return Pipeline(nodes=ranks, num_micro_batches=count, forward=forward, backward=backward)

    def _orders(self, problem: Problem) -> Orders:
        serial = serial_orders(problem)
        if self._config.schedule == "serial" or len(problem.pipelines) == 1:
            return serial
        plan = fused_plan(problem, _PLAN_SECONDS, self._seed)
        _log(plan, timeline(problem, serial).seconds, problem.pipelines[0].num_micro_batches)
        return plan.orders


def actions_of(orders: Orders, layout: Layout) -> list[tuple[Action, ...]]:
    """Of each rank: its tasks with their micro-batches, of which a critic's replicas take turns."""
    found = []
    for order in orders:
        counts: dict[tuple[int, int], int] = defaultdict(int)
        actions = []
        for model, kind in order:
            turn = counts[model, kind]
            counts[model, kind] += 1
            number = turn if model == POLICY else turn * layout.num_replicas + model - 1
            actions.append((model, kind, number))
        found.append(tuple(actions))
    return found


def num_interleaved(actions: Iterable[Sequence[Action]]) -> int:
    """Tasks of critics that a rank carries out after it has begun with the policy: none if the
    models are trained one after the other."""
    return sum(
        sum(model != POLICY for model, _, _ in dropwhile(lambda each: each[0] != POLICY, mine))
        for mine in actions
    )


def _means(reports: Sequence[Sequence[Mapping[str, float]]]) -> dict[tuple[int, int, int], float]:
    measured: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for answers in reports:
        for rank, answer in enumerate(answers):
            for name, seconds in answer.items():
                model, _, kind = name.partition(".")
                measured[int(model), int(kind), rank].append(seconds)
    return {key: fmean(values) for key, values in measured.items()}


def _log(plan: FusedPlan, serial: float, num_micro_batches: int) -> None:
    get_logger().info(
        "pipeline_planned",
        micro_batches=num_micro_batches,
        seconds=plan.seconds,
        bound=plan.bound,
        serial_seconds=serial,
        found_by=plan.found_by,
    )
