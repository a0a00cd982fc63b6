"""A rank of a trainer whose bytes torch's allocator reports: `-m bench.size.measured_rank`.

It trains a step, then measures the second micro-batch of the next step and its update.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tools.plan.training_count import sample_rows
from trainer.algorithms.base import make_algorithm
from trainer.commands import Accumulate
from trainer.config import TrainerConfig
from trainer.data.micro_batch import MicroBatch
from trainer.model.context_ranks import context_group
from trainer.model.load_sharded import load_sharded, ranks_mesh
from trainer.policy.policy import Policy
from trainer.policy.sharded_backend import ShardedBackend


def rank_policy(config: TrainerConfig) -> Policy:
    """The policy of one of a trainer's ranks, on the CPU. Collective."""
    algorithm, mesh = make_algorithm(config), ranks_mesh("cpu", 1)
    context = context_group(config.context_parallel)
    backend = ShardedBackend(load_sharded(config, mesh), mesh, algorithm, config, context)
    return Policy(backend, config)


def gradient_of(rows: MicroBatch, ranks: int = 1) -> Accumulate:
    """A step's only gradient, of one micro-batch on each rank."""
    trained = int(rows.loss_mask_BT.sum()) * ranks
    return Accumulate(
        weight_version=0, num_tokens=trained, denominator=trained, micro_batches=(rows,)
    )


def measured_bytes(config: TrainerConfig, rollout_tokens: int, prompt_tokens: int) -> int:
    """The most bytes of tensors on this rank at a time. Collective.

    Args:
        config: of the trainer.
        rollout_tokens: of each rollout.
        prompt_tokens: tokens of it that are not trained.
    """
    policy = rank_policy(config)
    rows = sample_rows(config.batch.micro_batch_tokens, rollout_tokens, prompt_tokens)
    command = gradient_of(rows)
    policy.accumulate(command)
    policy.optimize(1)
    policy.accumulate(command)
    before = sum(tensor.nbytes for tensor in policy.device_tensors())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        policy.accumulate(command)
        policy.optimize(2)
    return before + highest_bytes(recorded)


def highest_bytes(recorded: profile) -> int:
    """The most bytes that were allocated and not freed again."""
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = recorded.profiler.kineto_results.events()
    changes: Iterable[int] = [
        event.nbytes()  # type: ignore[attr-defined]
        for event in sorted(events, key=lambda each: each.start_ns())
        if event.name() == "[memory]"
    ]
    return max(accumulate(changes))


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="settings as JSON")
    parser.add_argument("--store", required=True, help="file in which ranks meet")
    for name in ("--rank", "--ranks", "--rollout-tokens", "--prompt-tokens"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    dist.init_process_group(
        "gloo", init_method=f"file://{given.store}", rank=given.rank, world_size=given.ranks
    )
    config = TrainerConfig.model_validate_json(given.config.read_text(encoding="utf-8"))
    found = measured_bytes(config, given.rollout_tokens, given.prompt_tokens)
    print(json.dumps({"bytes": found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
