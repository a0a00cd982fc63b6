"""`seamflow console bundle RUN --rollouts ID,ID --out DIR`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
from seamflow.errors import SeamflowError, decode
from seamflow.inspect.endpoints import UsageError
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ExitCode
from services.console.bundle.pages import write_pages
from services.console.bundle.recorded_answers import recorded_answers
from services.console.bundle.redaction import Redaction, known_secrets
from services.console.sources.run_store import RunStore, RunStores
from services.console.sources.shown_run import folder_run

_MOST = 1000


def bundle(arguments: Sequence[str], static: Path) -> int:
    """Write the folder; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        asyncio.run(_write(given, static))
    except (UsageError, ValueError, OSError) as error:
        sys.stderr.write(f"console bundle: {error}\n")
        return ExitCode.USAGE
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"console bundle: {decode(error)}\n")
        return ExitCode.UNAVAILABLE
    except SeamflowError as error:
        sys.stderr.write(f"console bundle: {error}\n")
        return ExitCode.UNAVAILABLE
    return ExitCode.CLEAN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seamflow console bundle",
        description="Write chosen rollouts as pages that open without a console, from a folder or "
        "any web server. What has the form of a credential is removed; look before you share.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--rollouts", help="their names, separated by commas")
    chosen.add_argument("--step", type=int, help="those that this step trained on")
    chosen.add_argument("--newest", type=int, metavar="N", help="the newest N")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    return parser


async def _write(given: argparse.Namespace, static: Path) -> None:
    if given.out.exists() and any(given.out.iterdir()):
        raise UsageError(f"--out {str(given.out)!r} is not empty: name a new folder")
    run, stores = folder_run(given.run), RunStores()
    redaction = Redaction(known_secrets(run.folder))
    try:
        store = await stores.of(run)
        names = await _names(given, store)
        answers = await recorded_answers(run, store, names, redaction)
    finally:
        await stores.close()
        if run.endpoints is not None:
            await run.endpoints.close()
    given.out.mkdir(parents=True, exist_ok=True)
    write_pages(static, given.out, answers)
    removed = f"; {redaction.num_removed} credentials removed" if redaction.num_removed else ""
    print(f"{len(names)} rollouts in {given.out}{removed}: open {given.out / 'index.html'}")


async def _names(given: argparse.Namespace, store: RunStore) -> list[str]:
    """Of the chosen rollouts, which must exist."""
    if given.rollouts:
        names = [name.strip() for name in given.rollouts.split(",") if name.strip()]
        search = pb.SearchRolloutsRequest(rollout_ids=names, page_size=_MOST)
    else:
        search = pb.SearchRolloutsRequest(step=given.step or 0)
        search.page_size = min(max(given.newest or _MOST, 1), _MOST)
        names = []
    found = [each.rollout_id for each in (await store.found(search)).rollouts]
    if missing := set(names) - set(found):
        raise UsageError(f"--rollouts: the run has no {sorted(missing)[0]!r}")
    if not found:
        raise UsageError("no rollout is chosen: the console lists those of each step")
    return found
