"""What the trainer does with its nodes while a batch fills up, and what it then leases."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2 import GenerationForecast, MeasuredBatch
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.metrics import counter
from tests.lib.scheduler.support import BOTH, RUN, heartbeat, register, running_scheduler
from tests.lib.trainer.support import trainer_config
from trainer.clients.node_client import NodeClient
from trainer.clients.sample_client import BatchProgress, SampleClient
from trainer.config import TrainerConfig
from trainer.data.token_sequence import TokenSequence
from trainer.leasing import batch_source
from trainer.leasing.accepted_samples import AcceptedSamples
from trainer.leasing.batch_source import BatchSource
from trainer.tracking.step_record import StepRecord
from trainer.tracking.tracker import Alarms

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

OVER = {"batch__timeout_seconds": 1e-9}
"""By the first look."""


def _sample(group_id: str, rollout_id: str, *, replayed: bool = False) -> trajectory_pb2.Sample:
    rewards = [tokens_pb2.Reward(name="reward", value=1.0)]
    return trajectory_pb2.Sample(
        group_id=group_id, rollout_id=rollout_id, rewards=rewards, replayed=replayed
    )


class FakeSampleClient(SampleClient):
    """Reports the next number of ready groups on each call; a group has four rollouts."""

    def __init__(self, *num_ready: int) -> None:
        self._num_ready = iter(num_ready)
        self._last = 0
        self.asked: list[int] = []
        self.leased: list[tuple[int, int]] = []

    def repeats(self, *steps: int) -> bool:
        """No step was leased before."""
        return False

    async def progress(
        self,
        step: int,
        base_weight_version: int,
        *,
        more_than: int = 0,
        wait_seconds: float = 0.0,
    ) -> BatchProgress:
        """Of batches of eight groups."""
        self.asked.append(more_than)
        self._last = next(self._num_ready)
        return BatchProgress(self._last, 8)

    async def lease_page(
        self,
        step: int,
        base_weight_version: int,
        first_sample: int,
        *,
        min_groups: int = 0,
        wait: bool = True,
    ) -> sample_pb2.LeaseSamplesResponse:
        """All at once."""
        assert first_sample == 0
        return await self.lease(step, base_weight_version, min_groups)

    async def lease(
        self, step: int, base_weight_version: int, min_groups: int = 0
    ) -> sample_pb2.LeaseSamplesResponse:
        """All that is ready, up to a batch."""
        self.leased.append((self._last, min_groups))
        return sample_pb2.LeaseSamplesResponse(
            samples=[
                _sample(f"{group}", f"{group}/{member}")
                for group in range(min(self._last, 8))
                for member in range(4)
            ]
            + [_sample("old", "old/0", replayed=True)]
        )


class FakeNodeClient(NodeClient):
    """Writes down what it is asked."""

    def __init__(self, return_seconds: float, shared: bool = True) -> None:
        self.return_seconds, self.shared = return_seconds, shared
        self.calls: list[str] = []
        self.done: list[int] = []
        self.tail: int | None = None
        self.measured: list[MeasuredBatch] = []

    async def release(
        self, batch: int = 0, forecast: GenerationForecast | None = None
    ) -> int | None:
        """With what is left of how much."""
        left = forecast and f": {forecast.remaining_rollouts}/{forecast.batch_rollouts}"
        self.calls.append(f"release for {batch}{left or ''}")
        self.done.append(forecast.done_rollouts if forecast else 0)
        if forecast is not None and forecast.HasField("newest_batch"):
            self.measured.append(forecast.newest_batch)
        return self.tail

    async def others_generate(self) -> bool:
        """As it was made."""
        return self.shared

    async def release_again(self) -> int | None:
        """Once more."""
        self.calls.append("give back")
        return self.tail

    async def request_ahead(self) -> None:
        """At any time."""
        self.calls.append("ask ahead")

    async def acquire(self, batch: int = 0) -> None:
        """All at once."""
        self.calls.append(f"acquire for {batch}")


def source(config: TrainerConfig, samples: SampleClient, nodes: NodeClient) -> BatchSource:
    """Of a model with 16 tokens."""
    return BatchSource(
        config, samples, nodes, AcceptedSamples(config, samples, Alarms(), 16, "dense")
    )


async def leased(batches: BatchSource, step: int) -> list[TokenSequence]:
    """All that a step is trained on."""
    parts = [part async for part in batches.chunks(StepRecord(step, 0))]
    return [item for part in parts for item in part.sequences]


async def waited(
    tmp_path: Path, first: list[int], second: list[int], return_seconds: float, **fields: Any
) -> tuple[list[str], FakeSampleClient]:
    """The calls for the second of two batches, and what there was of it."""
    config = trainer_config(run_id="run", model=tmp_path, checkpoint__folder=tmp_path, **fields)
    samples, nodes = FakeSampleClient(*first, *second), FakeNodeClient(return_seconds)
    batches = source(config, samples, nodes)
    for step in (1, 2):
        nodes.calls.clear()
        await leased(batches, step)
    looks = samples.asked[-len(second) :]
    assert looks == [0, *second[:-1]], "each look waits for one group more"
    return nodes.calls, samples


async def test_nodes_are_given_back_and_asked_for_before_the_batch_is_full(tmp_path: Path) -> None:
    """The way back is longer than the rest of the batch takes: asked for once half is ready."""
    calls, _ = await waited(tmp_path, [8], [1, 2, 4, 5, 8], 60.0)
    assert calls == ["release for 2: 28/32", "ask ahead", "acquire for 2"]


async def test_nodes_that_returned_too_early_are_released_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch was about to be full, and then was not for longer than they need to come back."""
    seconds = itertools.count()
    monkeypatch.setattr(
        batch_source, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)))
    )
    calls, _ = await waited(tmp_path, [8], [1, 2, 4, 6, *[7] * 50, 8], 20.0)
    assert calls == ["release for 2: 28/32", "ask ahead", "give back", "acquire for 2"]


async def test_nodes_are_not_asked_for_ahead_before_their_way_back_was_measured(
    tmp_path: Path,
) -> None:
    """Then there is nothing to compute the moment from."""
    calls, _ = await waited(tmp_path, [8], [1, 2, 4, 5, 8], 0.0)
    assert calls == ["release for 2: 28/32", "acquire for 2"]


async def test_a_full_batch_keeps_the_nodes(tmp_path: Path) -> None:
    """Nothing to lend them for, and nothing less is asked for, however long it took."""
    calls, samples = await waited(tmp_path, [8], [9], 60.0, **OVER)
    assert calls == ["acquire for 2"]
    assert samples.leased == [(8, 0), (9, 0)]


async def test_a_timeout_asks_for_the_nodes_once_anything_is_complete(tmp_path: Path) -> None:
    """Rollout is interrupted for part of a batch; for nothing it is not."""
    timeouts = counter("trainer", "batch_timeouts_total", "Waits that ended with a partial batch")
    before = timeouts._value.get()
    calls, samples = await waited(tmp_path, [8], [0, 0, 2], 60.0, **OVER)
    assert calls == ["release for 2: 32/32", "acquire for 2"]
    assert samples.leased == [(8, 0), (2, 1)]
    assert timeouts._value.get() == before + 1


async def test_the_least_part_can_be_set(tmp_path: Path) -> None:
    """Also the lease keeps to it: groups may grow too old on the way."""
    _, samples = await waited(tmp_path, [8], [2, 4], 60.0, batch__min_groups=3, **OVER)
    assert samples.leased == [(8, 0), (4, 3)]
    with pytest.raises(ValueError, match=r"give batch\.timeout_seconds too"):
        await waited(tmp_path, [8], [8], 60.0, batch__min_groups=3)


async def test_after_a_partial_batch_the_forecast_is_of_a_full_batch(tmp_path: Path) -> None:
    """The reported forecast is of whole batches."""
    calls, _ = await waited(tmp_path, [3], [0, 8], 60.0, **OVER)
    assert calls == ["release for 2: 32/32", "acquire for 2"]


async def test_done_rollouts_are_reported_once(tmp_path: Path) -> None:
    """Each release reports the rollouts leased since the last one, of full or partial batches.

    Trained groups that are replayed are no work of generation. The first release of a trainer's
    life reports 0: what an earlier trainer leased since its last release is not known.
    """
    config = trainer_config(run_id="run", model=tmp_path, checkpoint__folder=tmp_path, **OVER)
    samples, nodes = FakeSampleClient(8, 0, 8, 9, 0, 3, 0, 8), FakeNodeClient(60.0)
    batches = source(config, samples, nodes)
    for step in (1, 2, 3, 4, 5):
        await leased(batches, step)
    assert nodes.done == [0, 32 + 32, 12]


@pytest.mark.parametrize(("shared", "begins"), [(True, 3), (False, 8)])
async def test_nodes_are_taken_for_a_part_only_while_others_generate(
    tmp_path: Path, shared: bool, begins: int
) -> None:
    """Without them the rest would never come: the step waits for the full batch."""
    config = trainer_config(
        run_id="run", model=tmp_path, checkpoint__folder=tmp_path, batch__stream_groups=3
    )
    samples, nodes = FakeSampleClient(8, 1, 3, 8), FakeNodeClient(0.0, shared)
    batches = source(config, samples, nodes)
    await leased(batches, 1)
    nodes.calls.clear()
    await leased(batches, 2)
    assert nodes.calls == [f"release for 2: {4 * (begins - 1)}/32", "acquire for 2"]
    assert samples.leased[-1][0] == begins


AT_TAIL: dict[str, Any] = {"batch__start_at_tail": True, "scheduler": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("tail", "fields", "begins"),
    [
        (8, {}, 6),
        (200, {}, 1),
        (None, {}, 8),
        (0, {}, 8),
        (8, {"batch__stream_groups": 3}, 3),
        (8, {"batch__start_at_tail": False}, 8),
    ],
    ids=["tail", "whole batch", "unknown", "none", "by hand", "off"],
)
async def test_a_step_starts_when_so_many_rollouts_remain(
    tmp_path: Path, tail: int | None, fields: dict[str, Any], begins: int
) -> None:
    """Of the eight groups of four rollouts; what the operator set by hand overrides it."""
    values = AT_TAIL | fields
    config = trainer_config(run_id="run", model=tmp_path, checkpoint__folder=tmp_path, **values)
    samples, nodes = FakeSampleClient(8, 0, *range(1, 9)), FakeNodeClient(0.0)
    nodes.tail = tail
    batches = source(config, samples, nodes)
    await leased(batches, 1)
    record = StepRecord(2, 0)
    parts = [part async for part in batches.chunks(record)]
    assert samples.leased[-1][0] == begins
    assert record.numbers()["num_groups_at_start"] == begins
    assert parts[-1].last


async def test_the_scheduler_is_told_what_the_newest_step_was_like(tmp_path: Path) -> None:
    """Lengths of its groups, without those of replayed ones, and how long it trained."""
    config = trainer_config(run_id="run", model=tmp_path, checkpoint__folder=tmp_path, **AT_TAIL)
    nodes = FakeNodeClient(0.0)
    batches = source(config, FakeSampleClient(8, 0, 8), nodes)
    record = StepRecord(1, 0)
    _ = [part async for part in batches.chunks(record)]
    with record.phase("train"):
        await asyncio.sleep(0.01)
    await leased(batches, 2)
    (measured,) = nodes.measured
    assert [list(group.rollout_tokens) for group in measured.groups] == [[1] * 4] * 8
    assert seconds_of(measured.training_duration) == pytest.approx(record.seconds("train"))


async def test_a_timeout_interrupts_rollout_on_the_gang_s_node(tmp_path: Path) -> None:
    """The real scheduler takes the node out of rollout, though the batch never becomes whole."""
    config = trainer_config(run_id=RUN, model=tmp_path, checkpoint__folder=tmp_path, **OVER)
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        rollout = await register(stub, "both", *BOTH)
        await heartbeat(stub, "both", rollout.epoch)
        assert rollout.tag == "rollout"
        batches = source(config, FakeSampleClient(0, 2), NodeClient(channel, RUN, "trainer", 1))
        waiting = asyncio.create_task(leased(batches, 1))
        train = await heartbeat(stub, "both", rollout.epoch, wait=5.0)
        assert train.tag == "train"
        await heartbeat(stub, "both", train.epoch)
        assert len(await waiting) == 8 + 1, "and a replayed one"


async def _report_rates(stub: SchedulerServiceAsyncStub, *names: str) -> None:
    """Nodes that generate tell that one turn decodes as fast as sixteen."""
    nodes = (await stub.ListNodes(pb.ListNodesRequest())).nodes
    for node in (node for node in nodes if node.node_id in names):
        for turns in (1, 16):
            await stub.Heartbeat(
                pb.HeartbeatRequest(
                    node_id=node.node_id,
                    reported_epoch=node.assignment.epoch,
                    known_epoch=node.assignment.epoch,
                    state=pb.NODE_STATE_ACTIVE,
                    report=pb.NodeReport(
                        num_turns=turns, tokens_per_second=100.0 * turns, max_running=16
                    ),
                )
            )


async def _obey(stub: SchedulerServiceAsyncStub, name: str) -> None:
    """A node that takes up each of its assignments at once."""
    while True:
        nodes = (await stub.ListNodes(pb.ListNodesRequest())).nodes
        node = next(each for each in nodes if each.node_id == name)
        await heartbeat(stub, name, node.assignment.epoch)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("at_tail", [True, False])
async def test_the_scheduler_takes_the_gang_s_node_at_the_tail(
    tmp_path: Path, at_tail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven of eight groups are short; without the setting it takes it at the end of the last."""
    lengths = [[100] * 4] * 7 + [[200] * 4]
    measured = MeasuredBatch(groups=[pb.GroupTokens(rollout_tokens=each) for each in lengths])
    monkeypatch.setattr(batch_source, "measured_batch", lambda sequences: measured)
    values = AT_TAIL | {"batch__start_at_tail": at_tail}
    config = trainer_config(run_id=RUN, model=tmp_path, checkpoint__folder=tmp_path, **values)
    scheduler = running_scheduler(lending="always")
    async with scheduler as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        await register(stub, "other", "rollout")
        await register(stub, "both", *BOTH)
        await _report_rates(stub, "other", "both")
        samples = FakeSampleClient(8, 0, *range(1, 9))
        batches = source(config, samples, NodeClient(channel, RUN, "trainer", 1))
        obeying = asyncio.create_task(_obey(stub, "both"))
        first, second = StepRecord(1, 0), StepRecord(2, 0)
        _ = [part async for part in batches.chunks(first)]
        with first.phase("train"):
            await asyncio.sleep(0.5)
        parts = [part async for part in batches.chunks(second)]
        obeying.cancel()
        assert parts[-1].last
        started = second.numbers()["num_groups_at_start"]
        assert (started < 8) is at_tail


@pytest.mark.parametrize(("is_protected", "leased"), [(True, (8, 0)), (False, (2, 1))])
async def test_a_clock_that_is_set_ends_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_protected: bool, leased: tuple[int, int]
) -> None:
    """Negative control: by the wall clock, an hour ahead at each look, part of a batch is taken."""
    hours = itertools.count()
    monkeypatch.setattr("time.time", lambda: 3600.0 * next(hours))
    if not is_protected:
        monkeypatch.setattr(batch_source, "time", SimpleNamespace(monotonic=time.time))
    fields = {"batch__timeout_seconds": 600.0, "batch__min_groups": 1}
    _, samples = await waited(tmp_path, [8], [2, 8] if is_protected else [2], 60.0, **fields)
    assert samples.leased[-1] == leased
