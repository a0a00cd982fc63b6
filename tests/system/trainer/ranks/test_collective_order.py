"""All ranks make the same collective calls, whatever data each has; torch compares every call."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lib.mostly_long import mostly_long
from tests.lib.trainer.ranks.forked_ranks import exit_codes
from tests.lib.trainer.ranks.gang_run import run_rank
from tests.lib.trainer.support import JOB_CONFIG
from tests.system.trainer.ranks.mortal_run import Death, run_mortal
from trainer.commands import Accumulate
from trainer.policy.forward import Totals
from trainer.policy.policy import Predictions
from trainer.policy.sharded_backend import ShardedBackend

RANKS = 5
LONG = pytest.mark.long(short="tests/system/trainer/ranks/test_collective_order.py")
# Of four sequences: one of five ranks gets none.
ONE_GROUP = {"steps": [1, 2], "parts": [[0]]}
JOBS: dict[str, dict[str, Any]] = {
    "some ranks without data": ONE_GROUP,
    "parts of a step": {"steps": [1, 2], "parts": [[2], [0, 1]], "suspend_before": 2},
    "several updates": {
        "steps": [1],
        "config": {"algorithm__num_mini_batches": 2, "algorithm__num_epochs": 2},
    },
    "padded, with checkpointed activations": {
        "steps": [1],
        "config": {"batch__packing": False, "activation_checkpointing": True},
    },
    "logits of two tokens at a time": {"steps": [1], "config": {"batch__logit_tokens": 2}},
    "two pairs that share rows, and a rank alone": {
        "steps": [1],
        "config": {"context_parallel": 2, "activation_checkpointing": True},
    },
}


def compared(job: dict[str, Any], run: Callable[[dict[str, Any]], None] = run_rank) -> None:
    """A rank whose collectives torch compares with those of the others before each is made."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    run(job)


def without_empty(job: dict[str, Any]) -> None:
    """As if a rank without data could do without the forward pass, and add up its loss of 0."""

    def accumulate(
        backend: ShardedBackend, command: Accumulate, totals: Totals, proximal: Predictions
    ) -> dict[str, float]:
        for batch in command.micro_batches:
            if batch.loss_mask_BT.any():
                totals.add(*backend._backward(batch, command.weight_version, None))
            else:
                dist.all_reduce(torch.zeros(()))
        return {}

    ShardedBackend.accumulate = accumulate  # type: ignore[method-assign, assignment]
    compared(job)


def without_last(job: dict[str, Any]) -> None:
    """As if a rank with few rows could leave its last pass out, and go on to add up its loss."""
    real = ShardedBackend.accumulate

    def accumulate(backend: ShardedBackend, command: Accumulate, *given: Any) -> dict[str, float]:
        if dist.get_rank() != 1:
            return real(backend, command, *given)
        found = real(backend, replace(command, micro_batches=command.micro_batches[:-1]), *given)
        dist.all_reduce(torch.zeros(()))  # what it would do next
        return found

    ShardedBackend.accumulate = accumulate  # type: ignore[method-assign, assignment]
    compared(job)


def mortal(job: dict[str, Any]) -> None:
    """Ranks of two replicas, one of which dies."""
    compared(job, run_mortal)


@pytest.mark.parametrize("name", mostly_long(JOBS, "several updates", short=__file__))
def test_ranks_with_different_data_make_the_same_calls(
    model: Path, tmp_path: Path, name: str
) -> None:
    """Forward, backward, norms, updates, weights to publish."""
    given = {**JOBS[name], "config": {**JOB_CONFIG, **JOBS[name].get("config", {})}}
    job = {"model": str(model), "out": str(tmp_path), **given}
    assert exit_codes(RANKS, compared, job) == [0] * RANKS


@pytest.mark.parametrize(
    ("mutated", "steps"),
    [
        (without_empty, ONE_GROUP),
        pytest.param(without_last, {"steps": [1]}, marks=LONG),
    ],
)
def test_a_rank_that_skips_a_forward_pass_is_an_error_at_once(
    model: Path, tmp_path: Path, mutated: Callable[[dict[str, Any]], None], steps: dict[str, Any]
) -> None:
    """Negative controls: the mismatch is an error on every rank, and no rank hangs."""
    job = {"model": str(model), "out": str(tmp_path), "config": JOB_CONFIG, **steps}
    codes = exit_codes(RANKS, mutated, job)
    assert 0 not in codes
    assert None not in codes


@LONG
def test_those_that_are_left_make_the_same_calls(model: Path, tmp_path: Path) -> None:
    """A rank dies in its backward pass: the others form a group, and it joins again."""
    death = Death(rank=3, kind="Accumulate", number=2)
    config = {**JOB_CONFIG, "replicas": 2}
    job = {"model": str(model), "out": str(tmp_path), "config": config, "steps": 2}
    assert exit_codes(4, mortal, {**job, "deaths": (death,)}) == [0] * 4
    outcome = json.loads((tmp_path / "lead.json").read_text())
    assert outcome["sizes"] == [3, 4]
    assert "error" not in outcome
