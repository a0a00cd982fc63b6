"""Peak memory of four gloo ranks that train a model of 494 million parameters, and save it.

Real ranks: three steps with AdamW in float32, each with a checkpoint and published files. Beside
it the same ranks with a small model: what the processes take themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness.redis_process import free_port
from bench.size.loading import make_large_model
from bench.size.small_models import make_model

if TYPE_CHECKING:
    from trainer.config import TrainerConfig

_RANKS, _STEPS = 4, 3
_BYTES = 16
"""Of a parameter in float32: itself, its gradient, and two moments of AdamW."""
_POLL_SECONDS = 0.02
_ROLLOUT_TOKENS, _PROMPT_TOKENS = 128, 32
_STEP_TIMEOUT = 1800


def four_ranks() -> dict[str, float]:
    """Bytes a parameter of all ranks together, beside what a small model takes."""
    with tempfile.TemporaryDirectory(prefix="seamflow-size-") as scratch:
        bare = _peak_bytes(make_model(Path(scratch) / "small", "tied"), Path(scratch))
        peak = _peak_bytes(make_large_model(Path(scratch) / "large"), Path(scratch))
        parameters = _parameters(Path(scratch) / "large")
    return {
        "four_ranks_bare_mib": bare / (1 << 20),
        "four_ranks_peak_mib": peak / (1 << 20),
        "four_ranks_over_state": (peak - bare) / (_BYTES * parameters),
    }


def _parameters(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def _peak_bytes(model: Path, scratch: Path) -> int:
    """The most memory of all ranks together, but for mapped files."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder, _ranks(model, Path(folder)) as ranks:
        peak, deadline = 0, time.monotonic() + _STEP_TIMEOUT
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            peak = max(peak, sum(_resident(rank.pid) for rank in ranks))
            time.sleep(_POLL_SECONDS)
        codes = [rank.wait(1) for rank in ranks]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    return peak


@contextmanager
def _ranks(model: Path, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "bench.size.four_ranks", str(model), str(folder)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **meeting, "RANK": str(rank), "WORLD_SIZE": str(_RANKS)},
        )
        for rank in range(_RANKS)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _resident(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines()]
    kinds = ("RssAnon:", "RssShmem:")
    return sum(int(line[1]) << 10 for line in lines if line and line[0] in kinds)


def _main(model: Path, folder: Path) -> None:
    from trainer.config import TrainerConfig
    from trainer.ranks.command_channel import worker_loop
    from trainer.ranks.process_group import join
    from trainer.ranks.worker import Worker

    config = TrainerConfig.model_validate(
        {"run_id": "size", "model": model, "checkpoint": {"folder": folder / "checkpoints"}}
    )
    if os.environ["RANK"] == "0":
        asyncio.run(_command(config, folder))
        return
    ranks = join(config)
    worker_loop(ranks, Worker(config, ranks.store), _STEP_TIMEOUT)


async def _command(config: TrainerConfig, folder: Path) -> None:
    from bench.size.measured_rank import gradient_of
    from services.lib.weight_files.folder_names import folder_name
    from tools.plan.training_count import sample_rows
    from trainer.checkpoint import checkpoint_files
    from trainer.commands import Optimize
    from trainer.ranks.rank_group import RankGroup

    ranks = RankGroup()
    await ranks.start(config)
    chunk = gradient_of(sample_rows(_ROLLOUT_TOKENS, _ROLLOUT_TOKENS, _PROMPT_TOKENS), _RANKS)
    for step in range(1, _STEPS + 1):
        began = time.monotonic()
        await ranks.do(chunk)
        await ranks.do(Optimize(step=step))
        partial = checkpoint_files.begin(config.checkpoint.folder, step)
        await ranks.save(partial)
        weights = await ranks.snapshot()
        async with weights.attempt(version=step, spool=folder / folder_name(step)) as attempt:
            _ = [file async for file in attempt.files()]
        await ranks.wait_written(partial)
        print(json.dumps({"step": step, "seconds": time.monotonic() - began}), flush=True)
    await ranks.stop()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
