"""Wires the dataloader together: `python -m services.dataloader`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.chassis.rpc.clients import channel, credentials, with_token
from services.chassis.rpc.server import Service, run
from services.dataloader.check_tasks import check_tasks
from services.dataloader.config import DataloaderConfig
from services.dataloader.curriculum import Curriculum, GroupSizes
from services.dataloader.first_evaluation import await_first_evaluation
from services.dataloader.loader import Loader
from services.dataloader.success_rates import SuccessRates
from services.dataloader.task_queue import TaskQueue
from services.lib.tasks.sources import open_source


def main() -> None:
    """Submit all tasks, then exit; a signal ends it earlier."""
    run("dataloader", DataloaderConfig, build)


@asynccontextmanager
async def build(config: DataloaderConfig) -> AsyncIterator[Service]:
    """Open the task source and the channel to the trajectory manager."""
    source = await asyncio.to_thread(
        open_source,
        config.tasks,
        shuffle=config.shuffle,
        seed=config.seed,
        credentials=with_token(credentials(config), config.environment_token),
        start_seconds=config.start_seconds,
        num_heldout=config.num_heldout,
    )
    async with channel(config, config.trajectory_manager) as manager:
        queue = TaskQueue(
            manager,
            run_id=config.run_id,
            clock=time.monotonic,
            start_seconds=config.start_seconds,
        )
        rates = SuccessRates(config, manager)
        sizes = GroupSizes(config, rates) if config.max_samples else None
        curriculum = Curriculum(config, rates) if config.curriculum.share < 1 else None
        loader = await asyncio.to_thread(Loader, config, source, queue, sizes, curriculum)

        async def load() -> None:
            # Without a launcher nobody else has looked at all rows.
            if loader.is_at_start or config.broken_rows == "skip":
                _, loader.broken = await asyncio.to_thread(check_tasks, config, source)
            await await_first_evaluation(config)
            await loader.run()
            # A finished job ends like after a signal: drained, exit code 0.
            signal.raise_signal(signal.SIGTERM)

        yield Service(background=[load])
