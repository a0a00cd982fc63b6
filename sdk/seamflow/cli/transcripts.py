"""Reads the closed rollouts of a run, oldest first, as transcripts."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from seamflow.cli.export import load_arrow, retry_limit
from seamflow.cli.parser import Verbs
from seamflow.client.transcript import transcript
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import NotFoundError
from seamflow.inspect.endpoints import Endpoints, UsageError, decoder_of, manager_of_run
from seamflow.pages import pages
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.token_text import Decode
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

_PAGE = 1000

_ROWS = 1000
"""Rows of a row group of Parquet, which are held in memory."""

Add = Callable[[Mapping[str, Any]], None]
"""Appends a transcript."""


def register(verbs: Verbs) -> None:
    about = "Write the closed rollouts of a run with text and rewards, to JSON lines or Parquet."
    writing = verbs.add("transcripts", about, _transcripts)
    form = "new file: Parquet if its name ends with .parquet, else JSON lines"
    writing.add_argument("--out", type=Path, required=True, metavar="FILE", help=form)
    writing.add_argument("--purpose", choices=("train", "eval"), help="only these rollouts")
    writing.add_argument("--newest", type=_positive, metavar="N", help="only the newest N")
    writing.add_argument(
        "--model", type=Path, help="folder whose tokenizer turns ids into text (the run folder's)"
    )


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


async def _transcripts(given: argparse.Namespace, endpoints: Endpoints) -> int:
    decoder = decoder_of(given.model, endpoints)
    purpose = tokens_pb2.Purpose.Value(f"PURPOSE_{(given.purpose or 'unspecified').upper()}")
    async with manager_of_run(endpoints) as (channel, run_id):
        number = await write_transcripts(
            channel, run_id, given.out, decoder, purpose=purpose, newest=given.newest
        )
    print(f"{number} rollouts of run {run_id} in {given.out}")
    return 0


async def write_transcripts(
    channel: grpc.aio.Channel,
    run_id: str,
    file: Path,
    decode: Decode,
    *,
    purpose: tokens_pb2.Purpose.ValueType = tokens_pb2.PURPOSE_UNSPECIFIED,
    newest: int | None = None,
) -> int:
    """Replace `file` by one with a row for each rollout of `transcripts`; returns their number.

    Raises:
        UsageError: it is a Parquet file and pyarrow is missing, or it cannot be written.
        SeamflowError: the trajectory manager rejects the request, or does not answer.
    """
    number = 0
    with opened(file) as add:
        async for row in transcripts(channel, run_id, decode, purpose=purpose, newest=newest):
            add(row)
            number += 1
    return number


async def transcripts(
    channel: grpc.aio.Channel,
    run_id: str,
    decode: Decode,
    *,
    purpose: tokens_pb2.Purpose.ValueType = tokens_pb2.PURPOSE_UNSPECIFIED,
    newest: int | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """The rollouts that do not run any more: all, or the `newest` ones, of one or any purpose."""
    stub = async_stub(TrajectoryServiceStub, channel)
    request = pb.ListTrajectoriesRequest(run_id=run_id, page_size=_PAGE, headers_only=True)
    names: deque[str] = deque(maxlen=newest)
    async for page in pages(
        lambda page: retrying(lambda: stub.ListTrajectories(page), on_retry=retry_limit()), request
    ):
        names += [each.rollout_id for each in page.trajectories if _is_wanted(each, purpose)]
    for rollout_id in names:
        read = pb.GetTrajectoryRequest(run_id=run_id, rollout_id=rollout_id)
        try:
            answer = await retrying(
                lambda read=read: stub.GetTrajectory(read),  # type: ignore[misc]
                on_retry=retry_limit(),
            )
        except NotFoundError:
            continue  # deleted meanwhile
        yield transcript(answer.trajectory, decode)


def _is_wanted(header: trajectory_pb2.Trajectory, purpose: tokens_pb2.Purpose.ValueType) -> bool:
    is_closed = header.state != trajectory_pb2.ROLLOUT_STATE_RUNNING
    return is_closed and purpose in (tokens_pb2.PURPOSE_UNSPECIFIED, header.purpose)


@contextmanager
def opened(file: Path) -> Iterator[Add]:
    """What appends rows to `file`, which is replaced at the end of the block, if that succeeds.

    Raises:
        UsageError: pyarrow is missing for a Parquet file, or the file cannot be written.
    """
    kind = _parquet if file.suffix == ".parquet" else _json_lines
    partial = file.with_name(f".{file.name}.partial")
    try:
        with kind(partial) as add:
            yield add
        partial.replace(file)
    except OSError as error:
        raise UsageError(f"--out {str(file)!r} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _json_lines(file: Path) -> Iterator[Add]:
    with file.open("w", encoding="utf-8") as out:
        yield lambda row: print(json.dumps(row, ensure_ascii=False), file=out)


@contextmanager
def _parquet(file: Path) -> Iterator[Add]:
    arrow = load_arrow()
    schema, rows = _schema(arrow), list[Mapping[str, Any]]()
    with arrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
            rows.clear()

        def add(row: Mapping[str, Any]) -> None:
            rows.append(_entries(row))
            if len(rows) == _ROWS:
                flush()

        yield add
        flush()


def _entries(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its maps as lists of entries, as pyarrow takes them."""
    turns = [{**turn, "rewards": list(turn["rewards"].items())} for turn in row["turns"]]
    maps = {name: list(row[name].items()) for name in ("rewards", "labels")}
    return {**row, **maps, "turns": turns}


def _schema(arrow: Any) -> Any:
    text, versions = arrow.string(), arrow.list_(arrow.int64())
    rewards = arrow.map_(text, arrow.float64())
    turn = {
        **dict.fromkeys(("turn_id", "continues_turn_id", "prompt", "answer"), text),
        "finish_reason": text,
        "weight_versions": versions,
        "rewards": rewards,
    }
    fields = {
        **dict.fromkeys(("task_id", "rollout_id", "purpose", "state"), text),
        "weight_versions": versions,
        "rewards": rewards,
        "policy_failure": text,
        "truncated": arrow.bool_(),
        "failure": arrow.struct({"class": text, "message": text}),
        "labels": arrow.map_(text, text),
        "turns": arrow.list_(arrow.struct(turn)),
    }
    return arrow.schema(fields)
