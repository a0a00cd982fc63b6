"""Steps of one trainer's rank on a device: speed, memory, what a lending and a publish take.

A process of its own, which ends with a line of JSON: figures by name.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from bench.gpu.device_speed import (
    host_bytes_per_second,
    products_per_second,
    seconds_of,
)
from bench.size.measured_rank import gradient_of, highest_bytes
from tools.plan.training_count import TrainingCount, count_training, sample_rows
from trainer.commands import Accumulate, Optimize, Release, Restore, TakeSnapshot, WriteBuckets
from trainer.config import TrainerConfig
from trainer.model.load_model import DTYPES
from trainer.publish.snapshot_weights import SnapshotWeights
from trainer.ranks.process_group import join
from trainer.ranks.worker import Worker

SHAPES = {"cuda": (32_768, 4_096, 512), "cpu": (512, 128, 32)}
"""Tokens of a micro-batch, of a rollout, and of its prompt."""
_STEPS = 3


def training_figures(model: Path, device: str) -> dict[str, float]:
    """Measure a rank of this process, which has no process group.

    Args:
        model: folder.
        device: "cuda" or "cpu".
    """
    tokens, rollout, prompt = SHAPES[device]
    with TemporaryDirectory() as folder:
        config = _config(model, device, tokens, Path(folder))
        count = count_training(config, ranks=1, rollout_tokens=rollout, prompt_tokens=prompt)
        store = join(config).store
        worker = Worker(config, store)
        command = gradient_of(sample_rows(tokens, rollout, prompt))
        seconds, peak = _steps(worker, command, device)
        return {
            **_speed(count, seconds, device, DTYPES[config.dtype]),
            "forecast_bytes_error": abs(count.device_bytes / peak - 1),
            "training_peak_gb": peak / 1e9,
            **_lending(worker, device),
            **asyncio.run(_publish(worker, store, Path(folder) / "version")),
        }


def _config(model: Path, device: str, tokens: int, folder: Path) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "run_id": "gpu",
            "model": model,
            "device": device,
            "dtype": "bfloat16" if device == "cuda" else "float32",
            "batch": {"micro_batch_tokens": tokens},
            "checkpoint": {"folder": folder},
        }
    )


def _steps(worker: Worker, command: Accumulate, device: str) -> tuple[list[float], int]:
    """Seconds of each step but the first, and the most bytes of tensors in one of them."""
    seconds = []
    for step in range(1, _STEPS + 2):
        began = time.perf_counter()
        _step(worker, command, step)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:], _peak_bytes(worker, command, device)


def _step(worker: Worker, command: Accumulate, step: int) -> None:
    """Two micro-batches, as the forecast counts them, and the update."""
    worker.do(command)
    worker.do(command)
    worker.do(Optimize(step=step))


def _peak_bytes(worker: Worker, command: Accumulate, device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _step(worker, command, _STEPS + 2)
        return torch.cuda.max_memory_allocated()
    before = int(worker.do(Release())["num_bytes"])
    worker.do(Restore())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        _step(worker, command, _STEPS + 2)
    return before + highest_bytes(recorded)


def _speed(
    count: TrainingCount, seconds: list[float], device: str, dtype: torch.dtype
) -> dict[str, float]:
    flops = 2 * count.flops / median(seconds)
    return {
        "trained_tokens_per_second": 2 * count.tokens / median(seconds),
        "training_tflops": flops / 1e12,
        "training_over_product": flops / products_per_second(device, dtype),
    }


def _lending(worker: Worker, device: str) -> dict[str, float]:
    """The first release allocates the host's copy, and on a GPU pins it; others follow."""
    figures = {}
    for which in ("first", "later"):
        began = time.perf_counter()
        freed = worker.do(Release())["num_bytes"]
        released = time.perf_counter()
        worker.do(Restore())
        figures[f"release_{which}_seconds"] = released - began
        figures[f"restore_{which}_seconds"] = time.perf_counter() - released
    best = freed / host_bytes_per_second(device)
    figures["restore_over_copy"] = figures["restore_later_seconds"] / best
    return {"released_gb": freed / 1e9, **figures}


async def _publish(worker: Worker, store: Store, folder: Path) -> dict[str, float]:
    """Training waits for the copy alone; buckets are then written by a thread of the rank.

    The first publish allocates the host's copy, and on a GPU pins it; others follow.
    """
    figures = {}
    for version, which in enumerate(("first", "later"), 1):
        began = time.perf_counter()
        worker.do(TakeSnapshot())
        copied = time.perf_counter()
        size = await _written_bytes(worker, store, folder / which, version)
        written = time.perf_counter()
        figures[f"publish_stall_{which}_seconds"] = copied - began
        figures[f"publish_write_{which}_seconds"] = written - copied
    source, target = torch.zeros(2, size, dtype=torch.uint8).unbind()
    copy_seconds = seconds_of("cpu", lambda: target.copy_(source))
    return {
        "published_gb": size / 1e9,
        **figures,
        "publish_over_copy": (written - began) / copy_seconds,
    }


async def _written_bytes(worker: Worker, store: Store, folder: Path, version: int) -> int:
    """Have the rank write the buckets of its snapshot."""

    async def give(order: WriteBuckets) -> None:
        worker.do(order)

    weights = SnapshotWeights(worker.bucket_plan, store, give)
    async with weights.attempt(version=version, spool=folder) as attempt:
        return sum([file.num_bytes async for file in attempt.files()])


if __name__ == "__main__":
    print(json.dumps(training_figures(Path(sys.argv[1]), sys.argv[2])), flush=True)
