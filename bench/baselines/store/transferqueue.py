"""TransferQueue as one would use it for this: whole trajectories, as it has no append.

`--put one`: each writer puts one trajectory at a time (kv_put). `--put batch`: one writer puts a
whole batch at a time (kv_batch_put). Then all are got back in batches (kv_batch_get) and cleared.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np
import ray  # type: ignore[import-not-found]
import torch
import transfer_queue  # type: ignore[import-not-found]
from tensordict import TensorDict  # type: ignore[import-not-found]

from bench.baselines.store.workload import (
    Options,
    Reads,
    Result,
    Trajectory,
    Writes,
    make_parser,
    make_trajectories,
)

_PARTITION = "train"
_TAG = {"status": "finished"}
Columns = dict[str, torch.Tensor]
_COLUMNS = ("token_ids", "logprobs", "weight_versions")


def main() -> None:
    """Write, then read, in this process; storage and controller are Ray actors."""
    parser = make_parser(__doc__)
    parser.add_argument("--put", choices=("one", "batch"), default="one")
    arguments = parser.parse_args()
    options = Options.of(arguments)
    work = make_trajectories(options)
    whole = [_columns(trajectory) for trajectory in work]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing leaves the machine
    ray.init(
        # Its actors ask for a core each: two storage units and a controller.
        num_cpus=max(4, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    transfer_queue.init()
    put, name = _PUTS[arguments.put]
    # The first batch makes its connections, and is not counted.
    for part in (whole[: options.batch], whole):
        writes, reads = put(part, options), read(len(part), options)
    Result.of(name, work, writes, reads).print()
    transfer_queue.close()
    ray.shutdown()


def put_each(whole: Sequence[Columns], options: Options) -> Writes:
    """Every writer one whole trajectory at a time."""
    return asyncio.run(_put_each(whole, options))


async def _put_each(whole: Sequence[Columns], options: Options) -> Writes:
    untaken = iter(enumerate(whole))
    latencies: list[float] = []

    async def put() -> None:
        for index, columns in untaken:
            sent = time.monotonic()
            await transfer_queue.async_kv_put(
                key=_key(index), partition_id=_PARTITION, fields=columns, tag=_TAG
            )
            latencies.append(time.monotonic() - sent)

    started = time.monotonic()
    async with asyncio.TaskGroup() as writers:
        for _ in range(options.writers):
            writers.create_task(put())
    return Writes(started=started, ended=time.monotonic(), latencies=latencies)


def put_batches(whole: Sequence[Columns], options: Options) -> Writes:
    """One batch of whole trajectories after the other."""
    latencies: list[float] = []
    started = time.monotonic()
    for batch in _batches(len(whole), options):
        sent = time.monotonic()
        columns = {name: _jagged([whole[i][name] for i in batch]) for name in _COLUMNS}
        transfer_queue.kv_batch_put(
            keys=[_key(i) for i in batch],
            partition_id=_PARTITION,
            fields=TensorDict(columns, batch_size=len(batch)),
            tags=[_TAG] * len(batch),
        )
        latencies.append(time.monotonic() - sent)
    return Writes(started=started, ended=time.monotonic(), latencies=latencies)


def read(num_trajectories: int, options: Options) -> Reads:
    """Get all, a batch at a time, and clear it."""
    num_bytes = 0
    for batch in _batches(num_trajectories, options):
        keys = [_key(i) for i in batch]
        got = transfer_queue.kv_batch_get(keys=keys, partition_id=_PARTITION)
        num_bytes += sum(row.nbytes for name in _COLUMNS for row in got[name].unbind(0))
        transfer_queue.kv_clear(keys=keys, partition_id=_PARTITION)
    return Reads(ended=time.monotonic(), trajectories=num_trajectories, bytes=num_bytes)


def _batches(num_trajectories: int, options: Options) -> Iterator[range]:
    for start in range(0, num_trajectories, options.batch):
        yield range(start, min(start + options.batch, num_trajectories))


def _key(index: int) -> str:
    return f"trajectory-{index}"


def _columns(trajectory: Trajectory) -> Columns:
    """Each [num_tokens] of the whole trajectory."""
    return {
        name: torch.from_numpy(
            np.concatenate([getattr(part, name) for part in trajectory.segments])
        )
        for name in _COLUMNS
    }


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


_PUTS = {"one": (put_each, "transferqueue"), "batch": (put_batches, "transferqueue_batch")}


if __name__ == "__main__":
    main()
