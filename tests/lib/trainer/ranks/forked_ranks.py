"""Ranks as processes that are forked from one which has imported torch: they start at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer.ranks.lives import end_process

_SECONDS = 300.0
_PRELOADED = [
    "transformers.models.qwen3.modeling_qwen3",
    "tests.lib.trainer.ranks.gang_run",
    "trainer.pipeline.interpreter",
]


def run_forked(num_ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(*arguments)` in each rank; fail unless all return."""
    assert exit_codes(num_ranks, work, *arguments) == [0] * num_ranks


def exit_codes(num_ranks: int, work: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Call `work(*arguments)` in each rank; how each ended, None for one that hangs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # Here, as under torchrun, so that no rank ends the store of the others.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(
            target=_rank, args=(rank, num_ranks, store.port, work, arguments), daemon=True
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def _rank(
    rank: int, num_ranks: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    work(*arguments)
    end_process(0)
