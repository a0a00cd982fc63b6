"""Feed an export to a trainer again, without agents, environments or engines.

Every group that a step of the exported run committed is recorded in another run, in the order in
which it was trained, with the turns that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.json_format import Parse

from seamflow.cli.endpoints import UsageError
from seamflow.cli.export_run.export import load_arrow, part_file, read_progress, retry_limit
from seamflow.common.v1 import tokens_pb2
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub
import argparse

from seamflow.cli.arguments.verbs import Verbs
from seamflow.cli.endpoints import Endpoints, reached
from seamflow.cli.named_run import note

__all__ = ["recorded_groups", "register", "replay"]

_COLUMNS = [
    "sample_id",
    "rollout_id",
    "group_id",
    "rewards",
    "token_ids",
    "logprobs",
    "loss_mask",
    "spans",
    "turns",
    "committed_step",
    "truncated",  # not in exports of release 0.2
]

_STOP = tokens_pb2.FINISH_REASON_STOP
_FINISH_REASONS = {"LENGTH": tokens_pb2.FINISH_REASON_LENGTH}
"""By name; a turn that was not ended by a limit of tokens, or whose end is unknown, stopped."""

Row = Mapping[str, Any]
"""One sample, as `cli_export` wrote it."""


def register(verbs: Verbs) -> None:
    """Add `seamflow replay`."""
    replaying = verbs.add("replay", "Feed an export to the trainer of another run.", _replay)
    replaying.add_argument("folder", type=Path, help="what `seamflow export` wrote")


async def _replay(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if not given.run:
        raise UsageError("--run is missing: name a run that its trainer has created")
    async with reached(endpoints, "trajectory_manager") as channel:
        num_new = await replay(channel, given.folder, given.run, report=note)
    print(f"{num_new} groups recorded in run {given.run}")
    return 0


async def replay(
    channel: grpc.aio.Channel,
    folder: Path,
    run_id: str,
    *,
    report: Callable[[str], None] = lambda text: None,
) -> int:
    """Record the committed groups of an export in `run_id`; return how many were new.

    Waits while admission is closed: groups go in as the trainer takes them out.

    Raises:
        UsageError: pyarrow is missing, or the folder holds no complete export.
        SeamflowError: the trajectory manager rejects a group; NotFoundError for a run not created.
    """
    stub = async_stub(TrajectoryServiceStub, channel)
    num_new = 0

    def waits() -> None:
        report(f"{num_new} groups recorded; waiting for the trainer to take some")

    for group in recorded_groups(folder):
        # One at a time: the trajectory manager takes all groups of a call, or none.
        request = pb.RecordGroupsRequest(run_id=run_id, groups=[group])
        num_new += (await _recorded(stub, request, waits)).num_recorded
    report(f"{num_new} groups recorded")
    return num_new


async def _recorded(
    stub: TrajectoryServiceAsyncStub,
    request: pb.RecordGroupsRequest,
    waits: Callable[[], None],
) -> pb.RecordGroupsResponse:
    return await retrying(lambda: stub.RecordGroups(request), on_retry=retry_limit(waits))


def recorded_groups(folder: Path) -> Iterator[pb.RecordedGroup]:
    """The committed groups of a complete export, by step; holds the whole export in memory.

    Raises `UsageError` for a folder without one.
    """
    arrow = load_arrow()
    progress = read_progress(folder)
    if progress is None or not progress.complete:
        raise UsageError(f"{folder} holds no complete export: run `seamflow export` to its end")
    parts = [_part(arrow, part_file(folder, index)) for index in range(progress.num_parts)]
    table = arrow.concat_tables(parts) if parts else arrow.table({name: [] for name in _COLUMNS})
    places = _places(table)
    if not places:
        raise UsageError(f"{folder} holds no sample that a step committed: nothing to replay")
    for group_id, indexes in places.items():
        yield _group(group_id, table.take(indexes).to_pylist(maps_as_pydicts="strict"))


def _part(arrow: Any, file: Path) -> Any:
    known = arrow.parquet.read_schema(file).names
    return arrow.parquet.read_table(file, columns=[name for name in _COLUMNS if name in known])


def _places(table: Any) -> dict[str, list[int]]:
    """Rows of each committed group, groups in the order in which they were trained."""
    places: dict[str, list[int]] = {}
    steps: dict[str, int] = {}
    groups, committed = table.column("group_id"), table.column("committed_step")
    for index, (group_id, step) in enumerate(
        zip(groups.to_pylist(), committed.to_pylist(), strict=True)
    ):
        if step:
            places.setdefault(group_id, []).append(index)
            steps[group_id] = step
    return {group_id: places[group_id] for group_id in sorted(places, key=lambda name: steps[name])}


def _group(group_id: str, rows: Sequence[Row]) -> pb.RecordedGroup:
    rollouts: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: _slot(row["rollout_id"])):
        rollouts.setdefault(row["rollout_id"], []).append(row)
    return pb.RecordedGroup(
        task_id=group_id,
        payload_json="{}",
        rollouts=[_rollout(of_rollout) for of_rollout in rollouts.values()],
    )


def _slot(rollout_id: str) -> int:
    """Which sample of its group a rollout is; it is named group/sample/attempt."""
    return int(rollout_id.split("/")[-2])


def _rollout(rows: Sequence[Row]) -> pb.RecordedRollout:
    # What a limit cut off is the last turn.
    rows = sorted(rows, key=lambda row: bool(row.get("truncated")))
    turns = _turns(rows)
    trained = {turn.turn_id for turn in turns if _is_trained(turn.turn_id, rows)}
    rewards = [_reward(name, value, "") for name, value in rows[0]["rewards"].items()]
    of_turns = {turn["turn_id"]: turn["rewards"] for row in rows for turn in row["turns"]}
    for turn_id, named in of_turns.items():
        rewards += [_reward(name, value, turn_id) for name, value in named.items()]
    return pb.RecordedRollout(
        turns=turns,
        rewards=tokens_pb2.Rewards(
            rewards=rewards, truncated=any(row.get("truncated") for row in rows)
        ),
        untrained_turn_ids=[turn.turn_id for turn in turns if turn.turn_id not in trained],
    )


def _reward(name: str, value: float, turn_id: str) -> tokens_pb2.Reward:
    return tokens_pb2.Reward(name=name, value=value, turn_id=turn_id)


def _turns(rows: Sequence[Row]) -> list[trajectory_pb2.Turn]:
    """The turns of all samples of a rollout, parents first; of each the longest known part."""
    turns: dict[str, trajectory_pb2.Turn] = {}
    for row in rows:
        start, parent = 0, ""
        for part in row["turns"]:
            known = turns.get(part["turn_id"])
            if known is None or len(known.tokens.token_ids) < part["num_tokens"]:
                turns[part["turn_id"]] = _turn(row, part, start, parent)
            start, parent = start + part["num_tokens"], part["turn_id"]
    return list(turns.values())


def _turn(row: Row, part: Row, start: int, parent: str) -> trajectory_pb2.Turn:
    stop = start + part["num_tokens"]
    tokens = tokens_pb2.Tokens(
        token_ids=row["token_ids"][start:stop],
        logprobs=row["logprobs"][start:stop],
        spans=_spans(row["spans"], start, stop),
    )
    return trajectory_pb2.Turn(
        turn_id=part["turn_id"],
        prefix_turn_id=parent,
        prefix_length=start,
        tokens=tokens,
        finish_reason=_FINISH_REASONS.get(str(part.get("finish_reason")), _STOP),
        sampling=Parse(part["sampling"], tokens_pb2.SamplingParams()),
    )


def _is_trained(turn_id: str, rows: Sequence[Row]) -> bool:
    for row in rows:
        start = 0
        for part in row["turns"]:
            stop = start + part["num_tokens"]
            if part["turn_id"] == turn_id and any(row["loss_mask"][start:stop]):
                return True
            start = stop
    return False


def _spans(spans: Sequence[Row], start: int, stop: int) -> Iterator[tokens_pb2.Span]:
    """The parts of the spans in [start, stop), counted from `start`."""
    for span in spans:
        first = max(span["start"], start)
        end = min(span["start"] + span["num_tokens"], stop)
        if first < end:
            yield tokens_pb2.Span(
                start=first - start,
                num_tokens=end - first,
                origin=tokens_pb2.Origin.Value(f"ORIGIN_{span['origin']}"),
                weight_version=span["weight_version"],
                version_source=tokens_pb2.VersionSource.Value(
                    f"VERSION_SOURCE_{span['version_source']}"
                ),
                server_id=span["server_id"],
            )
