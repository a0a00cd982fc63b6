"""How near a step is to one that is balanced perfectly, with ranks in lock-step.

128 rows with lognormal lengths of at most 32,768 tokens, micro-batches of 32,768 tokens, FLOPs by
the shape of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from bench.size.consecutive import plan_consecutive
from trainer.data.row_cost import RowCost, cost_in
from trainer.data.row_plan import PackedRows, PlannedRow, RowPlan, lock_step, plan_packed

_ROWS, _LONGEST, _BUDGET = 128, 32_768, 32_768
_SPREAD = 0.7
"""Standard deviation of the logarithm of a length; the median is half the longest."""
_DENSE = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 5_120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""Qwen3-32B."""
_EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2_048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
"""Qwen3-30B-A3B."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on some ranks."""

    name: str
    shape: dict[str, Any]
    num_ranks: int

    def cost(self) -> RowCost:
        """Of rows in the model."""
        from transformers import AutoConfig

        return cost_in(AutoConfig.for_model(**self.shape))


CASES = (Case("16", _DENSE, 16), Case("4", _DENSE, 4), Case("moe", _EXPERTS, 16))


@dataclass(frozen=True, slots=True)
class Balance:
    """Figures, and the samples they are means of."""

    figures: dict[str, float] = field(default_factory=dict)
    raw: dict[str, list[float]] = field(default_factory=dict)


def balance(seeds: Sequence[int]) -> Balance:
    """`step_over_ideal_*` of the trainer's plans, `consecutive_over_ideal_*` of the baseline's."""
    found = Balance()
    for case in CASES:
        cost = case.cost()
        ours = partial(plan_packed, cost=cost, num_ranks=case.num_ranks, budget=_BUDGET)
        theirs = partial(plan_consecutive, num_ranks=case.num_ranks, budget=_BUDGET)
        for name, plan in (("step", ours), ("consecutive", theirs)):
            samples = [
                step_over_ideal(make_rows(seed), cost, case.num_ranks, plan) for seed in seeds
            ]
            found.raw[f"{name}_over_ideal_{case.name}"] = samples
            found.figures[f"{name}_over_ideal_{case.name}"] = fmean(samples)
    return found


def make_rows(seed: int) -> list[PlannedRow]:
    """Rows of groups of eight, without a prefix in common."""
    sampled = np.random.default_rng(seed).lognormal(np.log(_LONGEST / 2), _SPREAD, _ROWS)
    lengths = np.minimum(sampled, _LONGEST).astype(int).tolist()
    return [
        PlannedRow(number=number, group=number // 8, length=length, outputs=length - 1)
        for number, length in enumerate(lengths)
    ]


def step_over_ideal(
    rows: Sequence[PlannedRow],
    cost: RowCost,
    num_ranks: int,
    plan: Callable[[Sequence[PlannedRow]], RowPlan],
) -> float:
    """The FLOPs that ranks in lock-step wait for, over an equal share of all rows without padding.

    Args:
        rows: whose numbers count up from 0, without prefixes in common.
        cost: of rows in the model.
        num_ranks: number of ranks.
        plan: of the rows.
    """
    line = PackedRows(rows, cost)
    costs = [[line.cost(sorted(numbers)) for numbers in share] for share in plan(rows)]
    ideal = sum(line.cost([place]) for place in range(len(rows))) / num_ranks
    return lock_step(costs) / ideal
