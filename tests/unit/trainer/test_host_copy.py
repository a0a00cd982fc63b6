"""A checkpoint holds what was there when it was begun, though the copy is carried out later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from tests.lib.trainer.one_parameter import Weights
from trainer.checkpoint.shard_writer import ShardWriter
from trainer.commands import Command, Measure, Optimize
from trainer.host_copy import CudaStream, HostCopy, copy_stream
from trainer.policy.policy import Policy
from trainer.ranks.worker import Worker


class LateStream(CudaStream):
    """A device that copies when it must: before the work that was held back, or at `run`."""

    def __init__(self) -> None:
        self._copies: list[Callable[[], object]] = []
        self._done = threading.Event()

    def begin(self) -> None:
        """See `CudaStream`."""
        self._done.clear()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `CudaStream`."""
        self._copies.append(lambda: target.copy_(source))

    def end(self) -> None:
        """See `CudaStream`."""

    def wait(self) -> None:
        """See `CudaStream`."""
        assert self._done.wait(20)

    def hold_back(self) -> None:
        """See `CudaStream`."""
        self.run()

    def run(self) -> None:
        """Carry out all copies."""
        for copy in self._copies:
            copy()
        self._copies = []
        self._done.set()


@pytest.fixture(autouse=True)
def without_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU's driver pins memory."""
    empty = torch.empty

    def unpinned(*size: int, pin_memory: bool = False, dtype: torch.dtype) -> torch.Tensor:
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", unpinned)


def written(folder: Path, *, held_back: bool) -> torch.Tensor:
    """The parameter in the shard of a checkpoint, after a change of 1 that came meanwhile."""
    stream, policy = LateStream(), Weights(3)
    writer = ShardWriter(stream)
    writer.start(policy, folder, "rank.safetensors")
    if held_back:
        writer.hold_back()
    policy.shards["w"].add_(1)
    stream.run()
    while not writer.written(folder):
        pass
    return load_file(folder / "rank.safetensors")["parameter.w"]


def test_what_is_copied_late_is_what_was_there(tmp_path: Path) -> None:
    """A change of the weights is held back until they are copied."""
    assert written(tmp_path, held_back=True).eq(0).all()


def test_a_change_that_is_not_held_back_is_in_the_checkpoint(tmp_path: Path) -> None:
    """Negative control."""
    assert written(tmp_path, held_back=False).eq(1).all()


def test_buffers_are_kept_while_tensors_keep_their_shape() -> None:
    """Pinning takes seconds; those of the CPU are not kept, as they would only take memory."""
    stream = LateStream()
    copy, tensors = HostCopy(stream), {"a": torch.zeros(3), "b": torch.zeros(2)}
    first = copy.start(tensors.items())
    stream.run()
    second = copy.start({"a": torch.ones(3), "b": torch.ones(5)}.items())
    stream.run()
    assert second["a"] is first["a"]
    assert second["b"].shape == (5,)
    assert all(buffer.eq(1).all() for buffer in second.values())
    plain = HostCopy(copy_stream("cpu"))
    assert plain.start(tensors.items())["a"] is not plain.start(tensors.items())["a"]


@pytest.mark.parametrize(
    ("command", "events"),
    [
        (Optimize(step=1), ["held back", "optimize", "take rows"]),
        (Measure(step=1), ["measure"]),
    ],
)
def test_a_rank_holds_back_what_changes_its_state(command: Command, events: list[str]) -> None:
    """And nothing else: a gradient is computed beside the copy."""
    happened: list[str] = []

    class Noting:
        """A policy and the writer of its checkpoints."""

        def __getattr__(self, name: str) -> Callable[..., dict[str, float]]:
            def noted(*_: object) -> dict[str, float]:
                happened.append(name.replace("_", " ").replace("hold", "held"))
                return {}

            return noted

    worker = object.__new__(Worker)
    worker._shard_writer = cast("ShardWriter", Noting())
    worker._published_copy = HostCopy(copy_stream("cpu"))
    worker._loaded, worker._held = cast("Policy", Noting()), {}
    worker.do(command)
    assert happened == events


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_copy_on_the_cpu_is_none_of_the_live_weights(dtype: torch.dtype | None) -> None:
    """An update, and the next copy, leave it as it was: a version is published from one step."""
    live = torch.zeros(3)
    copy = HostCopy(copy_stream("cpu"))
    first = copy.start({"w": live}.items(), dtype)
    live.add_(1)
    second = copy.start({"w": live}.items(), dtype)
    assert (first["w"].tolist(), second["w"].tolist()) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("is_busy", [True, False])
def test_pinned_buffers_that_are_still_written_to_a_file_are_left_alone(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next snapshot of the weights takes others; as control, free ones are used again."""
    streams: list[LateStream] = []

    def stream(_: str) -> LateStream:
        streams.append(LateStream())
        return streams[-1]

    monkeypatch.setattr("trainer.ranks.worker.copy_stream", stream)
    worker, live = object.__new__(Worker), torch.zeros(3)
    held: list[Any] = []
    writer = SimpleNamespace(is_busy=is_busy, hold=held.append, forget=lambda: None)
    backend = SimpleNamespace(
        published_parts=lambda: iter({"w": live}.items()), checkpoint_tensors=None
    )
    given = {
        "_config": SimpleNamespace(device="cuda", dtype="float32"),
        "_published_copy": HostCopy(stream("cuda")),
        "_bucket_writer": writer,
        "_loaded": SimpleNamespace(backend=backend),
        "_bucket_plan": object(),
        "_held": {},
    }
    for name, value in given.items():
        setattr(worker, name, value)
    for _ in range(2):
        worker._take_snapshot()
        streams[-1].run()
        live.add_(1)
    found = [snapshot.parts["w"].tolist() for snapshot in held]
    assert found == [[0.0] * 3 if is_busy else [1.0] * 3, [1.0] * 3]
