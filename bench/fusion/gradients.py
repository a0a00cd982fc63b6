"""Gradients of a fused pipeline next to those of the whole models, on the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from bench.fusion.toy_models import (
    ActorEnd,
    CriticEnd,
    Rows,
    ToyStage,
    actor_loss,
    critic_loss,
    make_rows,
    make_stages,
)
from trainer.config import PipelineConfig
from trainer.pipeline.fused_schedule.plan import fused_plan, serial_orders
from trainer.pipeline.interpreter import Action, Interpreter, Peers, StageWork
from trainer.pipeline.layout import POLICY, Layout, layout_of
from trainer.pipeline.schedule import Schedules, actions_of
from trainer.pipeline.stage_work import HiddenStates

_ACTOR_SEED, _CRITIC_SEED, _ROWS_SEED = 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCase:
    """An actor and a critic in stages, and who computes what when."""

    actor_blocks: tuple[int, ...]
    """Blocks of each stage, one on each rank."""
    critic_blocks: tuple[int, ...]
    """Of each stage; fewer stages than ranks: replicas."""
    num_micro_batches: int
    """Of ragged sizes."""
    actions: Sequence[tuple[Action, ...]]
    """Of each rank."""

    @classmethod
    def planned(
        cls, actor: tuple[int, ...], critic: tuple[int, ...], num: int, *, fused: bool = True
    ) -> Self:
        """Planned once for all ranks, as a search ends by CPU time."""
        layout = layout_of(len(actor), len(critic))
        actions = plan_actions(layout, num, fused=fused)
        return cls(actor_blocks=actor, critic_blocks=critic, num_micro_batches=num, actions=actions)


def gradient_difference(case: GradientCase) -> float:
    """The greatest difference of a gradient, relative to the greatest entry. Collective."""
    actor_blocks, critic_blocks = case.actor_blocks, case.critic_blocks
    layout = layout_of(len(actor_blocks), len(critic_blocks))
    actions, num_micro_batches = case.actions[dist.get_rank()], case.num_micro_batches
    rows = make_rows(num_micro_batches, _ROWS_SEED)
    actor, critic = _models(actor_blocks, critic_blocks)
    own = run_step(layout, actions, actor, critic, rows, None)
    _add_replicas(layout, own)
    expected_actor, expected_critic = _models(actor_blocks, critic_blocks)
    _train_whole(expected_actor, expected_critic, rows)
    worst = torch.zeros((), dtype=torch.float64)
    for model, stage in own.items():
        whole = expected_actor if model == POLICY else expected_critic
        worst = worst.maximum(_difference(stage, whole[layout.stages_on(dist.get_rank())[model]]))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def plan_actions(
    layout: Layout, num_micro_batches: int, *, fused: bool
) -> list[tuple[Action, ...]]:
    """Of each rank."""
    problem = Schedules(layout, PipelineConfig(), 0).problem(num_micro_batches)
    orders = fused_plan(problem, 0.2).orders if fused else serial_orders(problem)
    return actions_of(orders, layout)


def run_step(
    layout: Layout,
    actions: Sequence[Action],
    actor: Sequence[ToyStage],
    critic: Sequence[ToyStage],
    rows: Sequence[Rows],
    store: Store | None,
) -> dict[int, ToyStage]:
    """Carry out this rank's actions; its stages by model, with gradients. Collective."""
    rank = dist.get_rank()
    own = {
        model: (actor if model == POLICY else critic)[index]
        for model, index in layout.stages_on(rank).items()
    }
    works = {
        model: _work(layout, model, index, own[model], rows)
        for model, index in layout.stages_on(rank).items()
    }
    Interpreter(layout, rank, Peers(layout, rank, "cpu", store)).run(actions, works)
    return own


def _models(
    actor_blocks: Sequence[int], critic_blocks: Sequence[int]
) -> tuple[list[ToyStage], list[ToyStage]]:
    actor = make_stages(actor_blocks, _ACTOR_SEED, critic=False)
    return actor, make_stages(critic_blocks, _CRITIC_SEED, critic=True)


def _work(
    layout: Layout, model: int, index: int, stage: ToyStage, rows: Sequence[Rows]
) -> StageWork:
    if not layout.is_last(model, index):
        return HiddenStates(cast("Any", stage), cast("Any", rows))
    return (ActorEnd if model == POLICY else CriticEnd)(stage, rows)


def _add_replicas(layout: Layout, own: dict[int, ToyStage]) -> None:
    """Add up the gradients of equal stages of a critic's replicas."""
    critics = layout.ranks[1:]
    for stage in range(len(critics[0]) if len(critics) > 1 else 0):
        ranks = [each[stage] for each in critics]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            (critic,) = (each for model, each in own.items() if model != POLICY)
            for gradient in _gradients(critic):
                dist.all_reduce(gradient, group=group)


def _train_whole(
    actor: Sequence[ToyStage], critic: Sequence[ToyStage], rows: Sequence[Rows]
) -> None:
    for each in rows:
        values = _through(critic, each)
        critic_loss(values, each).backward()  # type: ignore[no-untyped-call]
        actor_loss(_through(actor, each), values.detach()[..., 0], each).backward()  # type: ignore[no-untyped-call]


def _through(stages: Sequence[ToyStage], rows: Rows) -> Tensor:
    hidden: Tensor | None = None
    for stage in stages:
        hidden = stage(rows, hidden)
    assert hidden is not None, "a model has stages"
    return hidden


def _gradients(stage: nn.Module) -> list[Tensor]:
    return [p.grad for p in stage.parameters() if p.grad is not None]


def _difference(stage: nn.Module, expected: nn.Module) -> Tensor:
    pairs = zip(_gradients(stage), _gradients(expected), strict=True)
    return torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max()
