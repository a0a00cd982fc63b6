"""What the loop does with its nodes while a batch fills up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seamflow.scheduler.v1.scheduler_service_pb2 import Outlook

from trainer.config import TrainerConfig
from trainer.loop import Trainer
from trainer.readiness import Readiness


class Samples:
    """Becomes ready group by group, each time somebody looks."""

    def __init__(self, *num_ready: int) -> None:
        self._num_ready = iter(num_ready)
        self.asked: list[int] = []

    async def ready(self, step: int, *, more_than: int = 0, wait_seconds: float = 0.0) -> Readiness:
        """Of batches of eight groups."""
        self.asked.append(more_than)
        return Readiness(next(self._num_ready), 8)


class Nodes:
    """Writes down what it is asked."""

    def __init__(self, return_seconds: float) -> None:
        self.return_seconds = return_seconds
        self.calls: list[str] = []

    async def release(self, outlook: Outlook | None = None) -> None:
        """With what is left of how much."""
        left = outlook and f" {outlook.remaining_rollouts}/{outlook.batch_rollouts}"
        self.calls.append(f"release{left or ''}")

    async def ask_ahead(self, needed_time: float) -> None:
        """At any time."""
        self.calls.append("ask ahead")


async def waited(tmp_path: Path, num_ready: list[int], return_seconds: float, **fields: Any) -> Any:
    """The calls for one batch, after one of 32 rollouts was leased."""
    config = TrainerConfig(run_id="run", model=tmp_path, checkpoint_folder=tmp_path, **fields)
    samples, nodes = Samples(*num_ready), Nodes(return_seconds)
    trainer = Trainer(config, None, None, samples, nodes, None)  # type: ignore[arg-type]
    trainer._batch_rollouts = 32
    await trainer._wait_for_batch(2)
    assert samples.asked == [0, *num_ready[:-1]], "each look waits for one group more"
    return nodes.calls


async def test_nodes_are_given_back_and_asked_for_before_the_batch_is_full(tmp_path: Path) -> None:
    """The way back is longer than the rest of the batch takes: asked for once half is ready."""
    assert await waited(tmp_path, [1, 2, 4, 5, 8], 60.0) == ["release 28/32", "ask ahead"]


async def test_nodes_are_not_asked_for_ahead_when_that_is_switched_off(tmp_path: Path) -> None:
    """Nor while their way back was not measured."""
    off = {"request_ahead_seconds": 0.0}
    assert await waited(tmp_path, [1, 2, 4, 5, 8], 60.0, **off) == ["release 28/32"]
    assert await waited(tmp_path, [1, 2, 4, 5, 8], 0.0) == ["release 28/32"]


async def test_a_full_batch_keeps_the_nodes(tmp_path: Path) -> None:
    """Nothing to lend them for."""
    assert await waited(tmp_path, [9], 60.0) == []
