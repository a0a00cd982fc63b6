"""Make a backup: the snapshot first, then the files that belong to it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seamflow.release import RELEASE
from seamflow.weights.v1.weight_service_pb2 import Manifest

from services.lib.weight_files.folder_names import folder_name
from services.weights import keys as weight_keys
from services.weights.keys import Scope
from tools.backup.snapshot import (
    RDB,
    BackupError,
    Contents,
    copied,
    database_of,
    fetch_snapshot,
    require_one_server,
    serving,
    sha256_of,
)
from trainer.checkpoint.own_files import DamagedError, steps_in, verify
from trajectory_manager.store.redis.keys import RUNS, run_keys

_ATTEMPTS = 5
_COMPLETE = ".complete"
MODEL = "policy"


class _MovedOn(Exception):  # noqa: N818 -- not an error: try again
    """The run went on while its files were copied."""


async def save(
    url: str, out: Path, checkpoints: Mapping[str, Path], weights: Path | None
) -> Contents:
    """Make a backup in the new folder `out`, while the services run.

    Args:
        url: Redis.
        out: must not exist yet.
        checkpoints: `checkpoint.folder` of the trainer, by run.
        weights: `folder` of the weights service; None: weights are not copied.

    Raises:
        BackupError: what is missing, and the cure.
    """
    require_one_server(url)
    if await asyncio.to_thread(out.exists):
        raise BackupError(f"{out} exists: name a folder that does not")
    partial = out.with_name(f".{out.name}.partial")
    for attempt in range(_ATTEMPTS):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            contents = await _saved(url, partial, checkpoints, weights)
        except _MovedOn as error:
            if attempt == _ATTEMPTS - 1:
                cure = "raise checkpoint.keep, or stop the trainer for the time of the backup"
                raise BackupError(f"{error}, {_ATTEMPTS} times: {cure}") from error
            continue
        contents.write(partial)
        partial.rename(out)
        return contents
    raise AssertionError("the last attempt returns or raises")


async def _saved(
    url: str, folder: Path, checkpoints: Mapping[str, Path], weights: Path | None
) -> Contents:
    database = database_of(url)
    started = time.time()
    await fetch_snapshot(url, folder / RDB)
    async with serving(folder / RDB, database) as redis:
        contents = Contents(
            release=RELEASE, time=started, database=database, num_keys=await redis.dbsize()
        )
        known = sorted(name.decode() for name in await redis.smembers(RUNS))
        for unknown in checkpoints.keys() - set(known):
            raise BackupError(f"--checkpoints names run {unknown!r}; Redis has {known}")
        for run_id in known:
            numbers = await _steps(redis, run_id)
            contents.runs[run_id] = numbers
            if run_id in checkpoints:
                source = checkpoints[run_id]
                numbers["checkpoint_step"] = await asyncio.to_thread(
                    _copy_checkpoint, source, folder / "checkpoints" / run_id, numbers
                )
            if weights is not None:
                numbers["weight_version"] = await _copy_weights(
                    redis, run_id, weights, folder / "weights"
                )
    contents.files = await asyncio.to_thread(_checksums, folder)
    return contents


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


async def _steps(redis: Any, run_id: str) -> dict[str, int]:
    names = ("committed_step", "leased_step")
    counters = next(key for key in run_keys(run_id) if key.endswith(":counters"))
    found = await redis.hmget(counters, names)
    steps = {name: int(value or 0) for name, value in zip(names, found, strict=True)}
    return {**steps, "checkpoint_step": 0, "weight_version": 0}


def _copy_checkpoint(source: Path, target: Path, numbers: Mapping[str, int]) -> int:
    """Copy the newest checkpoint that the snapshot knows; returns its step, 0: there is none."""
    committed, leased = numbers["committed_step"], numbers["leased_step"]
    for step, found in reversed(steps_in(source).items()):
        if not committed <= step <= max(leased, committed):
            continue
        copy = target / found.name
        try:
            _copy_folder(found, copy)
            verify(copy)
        except (FileNotFoundError, DamagedError):  # deleted meanwhile, or never whole
            shutil.rmtree(copy, ignore_errors=True)
        else:
            return step
    if committed == 0:
        return 0
    raise _MovedOn(f"{source} has no whole checkpoint of steps {committed} to {leased}")


async def _copy_weights(redis: Any, run_id: str, source: Path, target: Path) -> int:
    """Copy the newest committed version; returns it, 0: there is none."""
    scope = Scope(run_id=run_id, model=MODEL)
    version = int(await redis.hget(weight_keys.counters(scope), "newest") or 0)
    if not version:
        return 0
    manifest = Manifest.FromString(await redis.hget(weight_keys.manifests(scope), str(version)))
    place = Path(run_id, MODEL, folder_name(version))
    for file in manifest.files:
        try:
            await asyncio.to_thread(copied, source / place / file.name, target / place / file.name)
        except FileNotFoundError as error:
            raise _MovedOn(f"{source / place / file.name} is missing") from error
        if await asyncio.to_thread(sha256_of, target / place / file.name) != file.sha256:
            raise BackupError(f"{source / place / file.name} differs from its manifest: damaged")
    return version


def _copy_folder(source: Path, target: Path) -> None:
    """All files, the marker of a whole folder last."""
    names = sorted((path.name for path in source.iterdir()), key=lambda name: name == _COMPLETE)
    for name in names:
        copied(source / name, target / name)
