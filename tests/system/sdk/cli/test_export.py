# ruff: noqa: E402 -- the SDK alone has neither pyarrow nor a trajectory manager
"""`seamflow export` and `dead-letters` against a real trajectory manager."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("redis")

from seamflow.channel import connect
from seamflow.cli.export import export, read_progress
from seamflow.common.v1 import tokens_pb2
from seamflow.inspect.endpoints import UsageError
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import (
    column_service_pb2,
    sample_service_pb2,
    trajectory_pb2,
    trajectory_service_pb2,
)
from seamflow.trajectory.v1.column_service_pb2_grpc import ColumnServiceStub

from services.lib.token_bytes import pack_logprobs
from tests.lib.trajectory_manager.client import RULES, Client, message, running_manager
from tests.system.sdk.cli.test_main import seamflow


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A trajectory manager of the test's own."""
    async with running_manager() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to it."""
    async with connect(address) as opened:
        yield opened


async def new_run(channel: grpc.aio.Channel, **rules: Any) -> Client:
    """A fresh run with RULES and these."""
    client = Client(channel, uuid.uuid4().hex)
    config = trajectory_pb2.RunConfig()
    config.CopyFrom(RULES)
    config.MergeFrom(trajectory_pb2.RunConfig(**rules))
    await client.create_run(config)
    return client


async def train(client: Client, epoch: int, step: int) -> list[trajectory_pb2.Sample]:
    """Lease one step and commit it."""
    leased = await client.lease_samples(epoch, step, wait=10)
    request = sample_service_pb2.CommitStepRequest(run_id=client.run_id, epoch=epoch, step=step)
    await client.samples.CommitStep(request)
    return list(leased.samples)


async def trained_run(channel: grpc.aio.Channel, **rules: Any) -> Client:
    """Group a is committed at step 1, group b waits, and an EVAL rollout is closed."""
    client = await new_run(channel, **rules)
    await client.submit("a", "b")
    for version in (3, 4, 5, 6):
        await client.play(version)
    await train(client, await client.reconcile(), 1)
    await client.start("eval")
    opened = await client.begin("eval", "t", [1])
    await client.append("eval", "t", opened.epoch, 0, message([1]))
    sampled = message([9], tokens_pb2.ORIGIN_POLICY, 7)
    await client.append("eval", "t", opened.epoch, 1, sampled)
    await client.end("eval", "t", opened.epoch)
    await client.finish("eval", 0.5)
    return client


async def record(client: Client, num_groups: int) -> None:
    """Many small groups at once."""
    span = message([2], tokens_pb2.ORIGIN_POLICY, 1).spans
    turn = trajectory_pb2.Turn(
        turn_id="t",
        tokens=tokens_pb2.Tokens(token_ids=[2], logprobs=[-0.5], spans=span),
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
    )
    rewards = tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)])
    rollout = trajectory_service_pb2.RecordedRollout(turns=[turn], rewards=rewards)
    request = trajectory_service_pb2.RecordGroupsRequest(run_id=client.run_id)
    for index in range(num_groups):
        request.groups.add(task_id=f"g{index:03}", payload_json="{}", rollouts=[rollout])
    await client.trajectories.RecordGroups(request)


def rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of an export."""
    return [
        row
        for file in sorted(folder.glob("*.parquet"))
        for row in parquet.read_table(file).to_pylist(maps_as_pydicts="strict")
    ]


async def test_an_export_holds_every_closed_rollout(
    channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    """One row per sample, with all that the trainer got and what became of it."""
    client = await trained_run(channel)
    done = await export(channel, client.run_id, tmp_path)
    assert (done.num_samples, done.num_parts) == (5, 1)
    found = {row["rollout_id"]: row for row in rows(tmp_path)}
    assert [row["committed_step"] for row in found.values()] == [1, 1, 0, 0, 0]
    assert found["a/0/1"] == {
        "sample_id": "a/0/1#t2",
        "rollout_id": "a/0/1",
        "group_id": "a",
        "purpose": "TRAIN",
        "state": "FINISHED",
        "rewards": {"reward": 1.0},
        "token_ids": [1, 2, 3, 4, 5, 6],
        "logprobs": [0.0, 0.0, -0.5, -0.5, 0.0, -0.5],
        "loss_mask": [False, False, True, True, False, True],
        "weight_versions": [-1, -1, 3, 3, -1, 3],
        "spans": found["a/0/1"]["spans"],
        "turns": found["a/0/1"]["turns"],
        "truncated": False,
        "min_weight_version": 3,
        "max_weight_version": 3,
        "committed_step": 1,
        "columns": {},
    }
    assert found["a/0/1"]["spans"][1] == {
        "start": 2,
        "num_tokens": 2,
        "origin": "POLICY",
        "weight_version": 3,
        "version_source": "ENGINE",
        "server_id": "server-1",
    }
    assert [
        (turn["turn_id"], turn["num_tokens"], json.loads(turn["sampling"]), turn["rewards"])
        for turn in found["a/0/1"]["turns"]
    ] == [("t1", 4, {}, {}), ("t2", 2, {}, {})]
    assert (found["eval"]["purpose"], found["eval"]["group_id"]) == ("EVAL", "")


async def test_columns_are_exported(channel: grpc.aio.Channel, tmp_path: Path) -> None:
    """What other consumers computed is in the row of its sample."""
    client = await new_run(channel, required_columns=["value"])
    await client.submit("a")
    for _ in range(2):
        await client.play()
    stub = async_stub(ColumnServiceStub, channel)
    lease = column_service_pb2.LeaseColumnRequest(
        run_id=client.run_id, column="value", request_id="one", max_samples=8
    )
    given = await stub.LeaseColumn(lease)
    write = column_service_pb2.WriteColumnRequest(
        run_id=client.run_id, column="value", lease_token=given.lease_token
    )
    for sample in given.samples:
        write.values.add(sample_id=sample.sample_id, values=pack_logprobs([0.25]))
    await stub.WriteColumn(write)
    await export(channel, client.run_id, tmp_path)
    assert [row["columns"] for row in rows(tmp_path)] == [{"value": [0.25]}] * 2


async def test_an_interrupted_export_resumes(channel: grpc.aio.Channel, tmp_path: Path) -> None:
    """One that died is finished without gap or double; one that was finished takes what is new."""
    client = await new_run(channel, groups_per_step=200)
    await record(client, 150)

    def die(text: str) -> None:
        raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt):
        await export(channel, client.run_id, tmp_path, part_bytes=1, report=die)
    progress = read_progress(tmp_path)
    assert progress is not None
    assert (progress.num_parts, progress.complete) == (1, False)
    # What a crash in the middle of a part leaves behind.
    (tmp_path / "part-00001.parquet").write_bytes(b"half")
    done = await export(channel, client.run_id, tmp_path, part_bytes=1)
    assert done.num_samples == 50
    again = await export(channel, client.run_id, tmp_path)
    assert (again.num_samples, again.num_parts) == (0, 2)
    await record(client, 160)
    assert (await export(channel, client.run_id, tmp_path)).num_samples == 10
    assert [row["group_id"] for row in rows(tmp_path)] == [f"g{i:03}" for i in range(160)]


async def test_what_is_exported_may_be_deleted(channel: grpc.aio.Channel, tmp_path: Path) -> None:
    """Only what the run needs no more goes, and only once it is on disk, also after a crash."""
    client = await trained_run(channel)

    def die(text: str) -> None:
        raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt):
        await export(channel, client.run_id, tmp_path, delete=True, report=die)
    assert (await client.get("a/0/1")).rollout_id == "a/0/1"
    done = await export(channel, client.run_id, tmp_path, delete=True)
    assert (done.num_samples, done.num_deleted, done.num_needed) == (0, 3, 2)
    assert len(rows(tmp_path)) == 5
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.get("a/0/1")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await client.get("b/0/1")).rollout_id == "b/0/1"


async def test_a_folder_belongs_to_one_export(channel: grpc.aio.Channel, tmp_path: Path) -> None:
    """Neither another run nor another choice of samples is mixed in."""
    client = await trained_run(channel)
    done = await export(channel, client.run_id, tmp_path, committed_only=True)
    assert done.num_samples == 2
    with pytest.raises(UsageError, match="--committed-only"):
        await export(channel, client.run_id, tmp_path)
    with pytest.raises(UsageError, match="another folder"):
        await export(channel, "other", tmp_path, committed_only=True)


async def test_a_missing_pyarrow_names_the_cure(
    channel: grpc.aio.Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra to install is in the message."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"pip install 'seamflow\[export\]'"):
        await export(channel, "run", tmp_path)


async def test_the_commands(address: str, channel: grpc.aio.Channel, tmp_path: Path) -> None:
    """export prints a summary."""
    client = await trained_run(channel)
    flags = ("--trajectory-manager", address)
    code, out, err = await seamflow(
        *("export", "--run", client.run_id, "--out", "kept", "--delete", *flags), cwd=tmp_path
    )
    assert code == 0, err
    assert "5 new samples" in out
    assert "3 rollouts deleted, 2 still needed" in out
    assert "5 samples in 1 files" in err


async def test_dead_letters_are_shown_and_queued_again(
    address: str, channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    """Why a group left, its rollouts, and another chance."""
    client = await new_run(channel, zero_variance_reward="reward")
    await client.submit("same")
    for _ in range(2):
        await client.play()
    flags = ("--run", client.run_id, "--trajectory-manager", address)
    code, out, err = await seamflow("dead-letters", *flags, cwd=tmp_path)
    assert code == 0, err
    for part in ("same  zero variance", "all rewards are 1.0", "same/0/1 same/1/1"):
        assert part in out
    code, out, _ = await seamflow("dead-letters", "--requeue", "same", *flags, cwd=tmp_path)
    assert (code, out) == (0, "1 of 1 tasks queued again\n")
    assert (await client.lease()).task.task_id == "same"


async def test_an_unreachable_service_ends_the_command(tmp_path: Path) -> None:
    """Exit code 69 and where it looked; only back-pressure is waited for without an end."""
    flags = ("--run", "run", "--trajectory-manager", "127.0.0.1:1")
    code, _, err = await seamflow("export", "--out", "kept", *flags, cwd=tmp_path)
    assert code == 69
    assert "127.0.0.1:1" in err
