"""Write a run's samples to Parquet files: they outlive the run and need no seamflow to read.

A folder holds part-00000.parquet, part-00001.parquet … and export.json, which records how far the
export came. A part is durable before export.json counts it, and export.json before the rollouts of
the part are deleted: an interrupted export resumes, and whatever is deleted is on disk.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import grpc.aio

from seamflow.cli.arrow_table import table_of
from seamflow.cli.parser import Verbs
from seamflow.errors import ExhaustedError, SeamflowError, UnavailableError
from seamflow.inspect.endpoints import Endpoints, UsageError, manager_of_run, note
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as trajectory_service
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

_PART_BYTES = 64 << 20
_DELETE_BATCH = 500
_MAX_ATTEMPTS = 2
_STATE = "export.json"


def register(verbs: Verbs) -> None:
    exporting = verbs.add("export", "Write a run's samples to Parquet files.", _export)
    exporting.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    exporting.add_argument(
        "--committed-only", action="store_true", help="only what a step committed"
    )
    exporting.add_argument(
        "--delete", action="store_true", help="then delete the rollouts the run no longer needs"
    )


async def _export(given: argparse.Namespace, endpoints: Endpoints) -> int:
    async with manager_of_run(endpoints) as (channel, run_id):
        done = await export(
            channel,
            run_id,
            given.out,
            delete=given.delete,
            committed_only=given.committed_only,
            report=note,
        )
    deleted = f", {done.num_deleted} rollouts deleted, {done.num_needed} still needed"
    print(
        f"{done.num_samples} new samples of run {run_id}; {given.out} holds {done.num_parts} files"
        f"{deleted if given.delete else ''}"
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an export came; the content of export.json."""

    run_id: str
    committed_only: bool
    page_token: str = ""
    """Page to read next; once complete, the last one again."""
    num_parts: int = 0
    """Parts that are durable."""
    complete: bool = False
    """Whether it reached the end of the run as it was then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export did."""

    num_samples: int
    num_parts: int
    """Files in the folder now."""
    num_deleted: int
    num_needed: int
    """Rollouts that are exported and were not deleted, because the run needs them."""


def load_arrow() -> Any:
    """pyarrow with its Parquet module; raises `UsageError` if it is not installed."""
    try:
        # By name, because only these commands need it and agents do not install it.
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError("this command needs pyarrow: pip install 'seamflow[export]'") from error


async def export(
    channel: grpc.aio.Channel,
    run_id: str,
    folder: Path,
    *,
    delete: bool = False,
    committed_only: bool = False,
    report: Callable[[str], None] = lambda text: None,
    part_bytes: int = _PART_BYTES,
) -> Exported:
    """Write the samples of `run_id` that `folder` lacks; a part closes at `part_bytes` of samples.

    Rollouts that are still running are skipped, also when the export is resumed later.

    Raises:
        UsageError: pyarrow is missing, or the folder holds another export.
        SeamflowError: the trajectory manager rejects the request.
    """
    arrow = load_arrow()
    began = _initial_progress(folder, run_id, committed_only)
    exporter = _Exporter(arrow, channel, folder, began, delete=delete, report=report)
    if began.num_parts and (delete or began.complete):
        await exporter.resume()
    await exporter.run(part_bytes)
    return exporter.done


def read_progress(folder: Path) -> Progress | None:
    """The progress in export.json; None if there is none.

    Raises `UsageError` if the file is not of an export.
    """
    file = folder / _STATE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        # A neighbouring release may write further fields.
        known = {each.name for each in fields(Progress)}
        return Progress(**{k: v for k, v in found.items() if k in known})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is not of an export: {error}; name another folder") from error


def part_file(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}.parquet"


def retry_limit(on_wait: Callable[[], None] = lambda: None) -> Callable[[SeamflowError], None]:
    """`on_retry` of one call: retries forever under back-pressure, a few times if unavailable."""
    num_unavailable = 0

    def on_retry(error: SeamflowError) -> None:
        nonlocal num_unavailable
        num_unavailable += isinstance(error, UnavailableError)
        if num_unavailable > _MAX_ATTEMPTS:
            raise error
        if isinstance(error, ExhaustedError):
            on_wait()

    return on_retry


def _initial_progress(folder: Path, run_id: str, committed_only: bool) -> Progress:
    fresh = Progress(run_id=run_id, committed_only=committed_only)
    known = read_progress(folder)
    if known is None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.parquet")):
            raise UsageError(f"{folder} holds Parquet files of no export: name another folder")
        return fresh
    if (known.run_id, known.committed_only) != (run_id, committed_only):
        only = " --committed-only" if known.committed_only else ""
        raise UsageError(
            f"{folder} holds an export of run {known.run_id!r}{only}: continue that one, or name "
            "another folder"
        )
    return known


class _Exporter:
    """One export in progress."""

    def __init__(
        self,
        arrow: Any,
        channel: grpc.aio.Channel,
        folder: Path,
        progress: Progress,
        *,
        delete: bool,
        report: Callable[[str], None],
    ) -> None:
        self._arrow = arrow
        self._folder = folder
        self._progress = progress
        self._deletes = delete
        self._report = report
        self._samples = async_stub(SampleServiceStub, channel)
        self._trajectories = async_stub(TrajectoryServiceStub, channel)
        self._seen = set[str]()
        self.done = Exported(
            num_samples=0, num_parts=progress.num_parts, num_deleted=0, num_needed=0
        )

    async def resume(self) -> None:
        """Skip the rollouts that earlier calls wrote, and delete them if requested."""
        for index in range(self._progress.num_parts):
            file = part_file(self._folder, index)
            table = self._arrow.parquet.read_table(file, columns=["rollout_id"])
            rollout_ids = dict.fromkeys(table.column("rollout_id").to_pylist())
            if self._progress.complete:
                self._seen.update(rollout_ids)
            await self._delete_rollouts(rollout_ids)

    async def run(self, part_bytes: int) -> None:
        """Read all pages, and write a part after every `part_bytes` of samples."""
        rows: list[sample_pb.ListedSample] = []
        size, token, end = 0, self._progress.page_token, False
        while not end:
            page = await self._page(token)
            new = [row for row in page.samples if self._is_new(row)]
            rows += new
            size += sum(row.ByteSize() for row in new)
            end = not page.next_page_token
            token = page.next_page_token or token
            if size >= part_bytes or end:
                await self._close_part(rows, token, end)
                rows, size = [], 0

    async def _page(self, token: str) -> sample_pb.ListSamplesResponse:
        request = sample_pb.ListSamplesRequest(run_id=self._progress.run_id, page_token=token)
        return await retrying(lambda: self._samples.ListSamples(request), on_retry=retry_limit())

    def _is_new(self, row: sample_pb.ListedSample) -> bool:
        if self._progress.committed_only and not row.committed_step:
            return False
        return row.sample.rollout_id not in self._seen

    async def _close_part(
        self, rows: Sequence[sample_pb.ListedSample], token: str, end: bool
    ) -> None:
        index = self._progress.num_parts
        if rows:
            table = table_of(self._arrow, rows)
            _write(part_file(self._folder, index), lambda file: self._store(table, file))
        self._progress = replace(
            self._progress, page_token=token, num_parts=index + bool(rows), complete=end
        )
        text = json.dumps(asdict(self._progress), indent=2)
        _write(self._folder / _STATE, lambda file: file.write_text(text, encoding="utf-8"))
        self.done = replace(
            self.done,
            num_samples=self.done.num_samples + len(rows),
            num_parts=self._progress.num_parts,
        )
        self._report(f"{self.done.num_samples} samples in {self.done.num_parts} files")
        await self._delete_rollouts(dict.fromkeys(row.sample.rollout_id for row in rows))

    def _store(self, table: Any, file: Path) -> None:
        self._arrow.parquet.write_table(table, file, compression="zstd")

    async def _delete_rollouts(self, rollout_ids: Iterable[str]) -> None:
        names = list(rollout_ids) if self._deletes else []
        for start in range(0, len(names), _DELETE_BATCH):
            request = trajectory_service.DeleteTrajectoriesRequest(
                run_id=self._progress.run_id, rollout_ids=names[start : start + _DELETE_BATCH]
            )
            answer = await self._deleted(request)
            self.done = replace(
                self.done,
                num_deleted=self.done.num_deleted + answer.num_deleted,
                num_needed=self.done.num_needed + len(answer.needed_rollout_ids),
            )

    async def _deleted(
        self, request: trajectory_service.DeleteTrajectoriesRequest
    ) -> trajectory_service.DeleteTrajectoriesResponse:
        return await retrying(
            lambda: self._trajectories.DeleteTrajectories(request), on_retry=retry_limit()
        )


def _write(file: Path, content: Callable[[Path], object]) -> None:
    """Write a file atomically and durably."""
    temporary = file.with_name(f".{file.name}.tmp")
    content(temporary)
    _sync(temporary)
    temporary.replace(file)
    _sync(file.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
