"""The two sides of the measurement: a trajectory manager and two scoring processes each.

`per_sample` is the product. `per_group` is the rule that it had before: the same scripts without
the line that queues the cells of a sample when its rollout has finished, so that they are queued
when its group is complete.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, cast

from seamflow.trajectory.v1.column_service_pb2 import WriteColumnResponse

from bench.harness.processes import service as service_process
from bench.scoring.generation import RUN_ID, VOCABULARY
from services.chassis.rpc.server import started
from trajectory_manager.cli import service
from trajectory_manager.config import TrajectoryManagerConfig
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.column_store import ColumnLease, ColumnStore
from trajectory_manager.store.redis.connect import SCRIPTS, Store, redis_store

COLUMNS = {"ref_logprobs": "logprobs", "reward": "reward_model"}
"""Columns and their scorers."""
SIDES = ("per_sample", "per_group")
_LINE = "if group.purpose == '1' then queue_cells(task_id, slot, rules.required_columns) end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A lease of samples, from the begin to the write of the column; monotonic seconds."""

    begin: float
    end: float
    column: str
    sample_ids: tuple[str, ...]


class TimedColumns:
    """A `ColumnStore` that notes what was written when."""

    def __init__(self, columns: ColumnStore) -> None:
        self._columns = columns
        self._begins: dict[int, float] = {}
        self.work: list[Work] = []
        """All leases that were written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._columns, name)

    async def lease(self, *asked: Any) -> ColumnLease | None:
        """See `ColumnStore`."""
        found = await self._columns.lease(*asked)
        if found is not None:
            self._begins[found.epoch] = monotonic()
        return found

    async def complete(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> WriteColumnResponse:
        """See `ColumnStore`."""
        written = await self._columns.complete(run_id, column, epoch, sample_ids)
        work = Work(
            begin=self._begins[epoch],
            end=monotonic(),
            column=column,
            sample_ids=tuple(sample_ids),
        )
        self.work.append(work)
        return written


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side, ready."""

    store: Store
    columns: TimedColumns


@asynccontextmanager
async def side(name: str, redis_url: str, folder: Path, models: Path) -> AsyncIterator[Side]:
    """A manager in this process and the scoring processes on it."""
    scripts = SCRIPTS if name == "per_sample" else _old_rule(folder / "lua")
    config = TrajectoryManagerConfig(redis_url=redis_url, port=0, admin_port=-1)
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(
            redis_store(redis_url, Durability.FAST, 30.0, scripts)
        )
        columns = TimedColumns(opened.columns)
        store = replace(opened, columns=cast(ColumnStore, columns))
        port = await stack.enter_async_context(started(service(config, store), config))
        for column, scorer in COLUMNS.items():
            process = service_process(
                "services.scoring",
                "scoring",
                _made(folder / column),
                run_id=RUN_ID,
                column=column,
                scorer=scorer,
                model=models / scorer,
                trajectory_manager=f"127.0.0.1:{port}",
            )
            stack.enter_context(process)
        yield Side(store=store, columns=columns)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _old_rule(folder: Path) -> Path:
    _made(folder)
    for path in SCRIPTS.glob("*.lua"):
        source = path.read_text()
        assert source.count(_LINE) == (path.stem == "settle_rollouts")
        (folder / path.name).write_text(source.replace(_LINE, ""))
    return folder


def make_models(folder: Path) -> None:
    """A frozen model for each scorer, with random weights."""
    import torch
    from transformers import (
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3ForSequenceClassification,
    )

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    config.num_labels = 1
    Qwen3ForCausalLM(config).save_pretrained(folder / "logprobs")
    reward_model: Any = Qwen3ForSequenceClassification(config)  # type: ignore[no-untyped-call]
    reward_model.save_pretrained(folder / "reward_model")
