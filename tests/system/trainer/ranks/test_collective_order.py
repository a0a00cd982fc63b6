"""All ranks make the same collective calls, whatever data each has; torch compares every call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lib.trainer.ranks.forked_ranks import exit_codes
from tests.lib.trainer.ranks.gang_run import run_rank
from tests.lib.trainer.support import JOB_CONFIG
from trainer.data.computations import Accumulate
from trainer.policy.backend import Predictions
from trainer.policy.sharded_backend import ShardedBackend
from trainer.policy.totals import Totals

RANKS = 5
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


def compared(job: dict[str, Any], *, skipping: bool = False) -> None:
    """A rank whose collectives torch compares with those of the others before each is made."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    if skipping:
        ShardedBackend.accumulate = _without_empty  # type: ignore[method-assign, assignment]
    run_rank(job)


def _without_empty(
    backend: ShardedBackend, command: Accumulate, totals: Totals, proximal: Predictions
) -> dict[str, float]:
    """As if a rank without data could do without the forward pass, and add up its loss of 0."""
    for batch in command.micro_batches:
        if batch.loss_mask_BT.any():
            totals.add(backend._backward(batch, command.weight_version, None))
        else:
            dist.all_reduce(torch.zeros(()))
    return {}


@pytest.mark.parametrize("name", JOBS)
def test_ranks_with_different_data_make_the_same_calls(
    model: Path, tmp_path: Path, name: str
) -> None:
    """Forward, backward, norms, updates, weights to publish."""
    given = {**JOBS[name], "config": {**JOB_CONFIG, **JOBS[name].get("config", {})}}
    job = {"model": str(model), "out": str(tmp_path), **given}
    assert exit_codes(RANKS, compared, job) == [0] * RANKS


def test_a_rank_that_skips_a_forward_pass_is_an_error_at_once(model: Path, tmp_path: Path) -> None:
    """Negative control: the mismatch is an error on every rank, and no rank hangs."""
    job = {"model": str(model), "out": str(tmp_path), "config": JOB_CONFIG, **ONE_GROUP}
    codes = exit_codes(RANKS, _skipping, job)
    assert 0 not in codes
    assert None not in codes


def _skipping(job: dict[str, Any]) -> None:
    compared(job, skipping=True)
