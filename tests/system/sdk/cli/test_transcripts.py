"""`seamflow transcripts` against a real trajectory manager."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from seamflow.channel import connect
from seamflow.cli.transcripts import transcripts, write_transcripts
from seamflow.client.transcript import transcript
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import NotFoundError
from seamflow.inspect.endpoints import UsageError
from seamflow.token_text import token_numbers
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.trajectory_manager.client import Client, message, running_manager
from tests.system.sdk.cli.test_main import seamflow

TURN = {"finish_reason": "STOP", "weight_versions": [3], "rewards": {}}
FIRST = {
    "task_id": "a",
    "rollout_id": "a/0/1",
    "purpose": "TRAIN",
    "state": "FINISHED",
    "weight_versions": [3],
    "rewards": {"reward": 0.25},
    "policy_failure": "",
    "truncated": False,
    "failure": None,
    "labels": {},
    "turns": [
        {"turn_id": "t1", "continues_turn_id": "", "prompt": "1 2 ", "answer": "3 4 ", **TURN},
        {"turn_id": "t2", "continues_turn_id": "t1", "prompt": "5 ", "answer": "6 ", **TURN},
    ],
}


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A trajectory manager of the test's own."""
    async with running_manager() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
async def client(address: str) -> AsyncIterator[Client]:
    """A run with two rollouts of task a, one for evaluation, and one that still runs."""
    async with connect(address) as channel:
        client = Client(channel, uuid.uuid4().hex)
        await client.create_run()
        await client.submit("a")
        await client.play(3, 0.25)
        await client.play(3, 1.0)
        await client.start("eval")
        opened = await client.begin("eval", "t", [1])
        await client.append("eval", "t", opened.epoch, 0, message([1]))
        await client.end("eval", "t", opened.epoch)
        await client.fail("eval")
        await client.start("running")
        yield client


async def read(client: Client, **filters: Any) -> list[dict[str, Any]]:
    """The transcripts of a run."""
    found = transcripts(client.channel, client.run_id, token_numbers, **filters)
    return [row async for row in found]


async def test_json_lines_hold_every_closed_rollout(
    address: str, client: Client, tmp_path: Path
) -> None:
    """As a process: one line each, in the order in which they began; without a model, ids."""
    (tmp_path / "out.jsonl").write_text("of an earlier run")
    flags = ("--trajectory-manager", address, "--run", client.run_id)
    code, out, err = await seamflow("transcripts", "--out", "out.jsonl", *flags, cwd=tmp_path)
    assert (code, out) == (0, f"3 rollouts of run {client.run_id} in out.jsonl\n")
    assert "--model" in err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0] == FIRST
    assert [row["rollout_id"] for row in rows] == ["a/0/1", "a/1/1", "eval"]
    assert rows[2]["policy_failure"] == "it said nothing"
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


async def test_rollouts_are_chosen_by_purpose_and_age(client: Client) -> None:
    """Either filter, and both."""
    evaluated = await read(client, purpose=tokens_pb2.PURPOSE_EVAL)
    assert [row["rollout_id"] for row in evaluated] == ["eval"]
    newest = await read(client, purpose=tokens_pb2.PURPOSE_TRAIN, newest=1)
    assert [row["rollout_id"] for row in newest] == ["a/1/1"]


async def test_parquet_holds_the_same_rows(client: Client, tmp_path: Path) -> None:
    """Maps by name, lists of turns."""
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "out.parquet"
    number = await write_transcripts(client.channel, client.run_id, file, token_numbers)
    rows = parquet.read_table(file).to_pylist(maps_as_pydicts="strict")
    assert (number, rows) == (3, await read(client))
    assert rows[0] == FIRST


async def test_a_failure_leaves_the_file_as_it_was(client: Client, tmp_path: Path) -> None:
    """A run that does not exist, and a folder that does not."""
    file = tmp_path / "out.jsonl"
    file.write_text("of an earlier run")
    with pytest.raises(NotFoundError):
        await write_transcripts(client.channel, "nobody", file, token_numbers)
    assert file.read_text() == "of an earlier run"
    with pytest.raises(UsageError, match="cannot be written"):
        await write_transcripts(client.channel, client.run_id, tmp_path / "no" / "x", token_numbers)


async def test_a_missing_pyarrow_names_the_cure(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Parquet needs it."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    given = (client.channel, client.run_id)
    with pytest.raises(UsageError, match=r"seamflow\[export\]"):
        await write_transcripts(*given, tmp_path / "out.parquet", token_numbers)
    assert await write_transcripts(*given, tmp_path / "out.jsonl", token_numbers) == 3


def test_a_failure_and_the_rewards_of_a_turn_are_shown() -> None:
    """Those of the turn are not among those of the rollout."""
    failed = trajectory_pb2.Trajectory(
        failure=tokens_pb2.Failure(
            failure_class=tokens_pb2.FAILURE_CLASS_TIMEOUT, message="took over 5 s"
        )
    )
    assert transcript(failed, token_numbers)["failure"] == {
        "class": "TIMEOUT",
        "message": "took over 5 s",
    }
    given = [
        tokens_pb2.Reward(name="r", value=1),
        tokens_pb2.Reward(name="r", value=2, turn_id="t"),
    ]
    row = transcript(
        trajectory_pb2.Trajectory(
            turns=[trajectory_pb2.Turn(turn_id="t")], rewards=tokens_pb2.Rewards(rewards=given)
        ),
        token_numbers,
    )
    assert (row["rewards"], row["turns"][0]["rewards"]) == ({"r": 1.0}, {"r": 2.0})
