"""Tells in the terminal what speaks against learning: when it appears, and when it ends."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import grpc.aio
from seamflow.inspect.diagnosis import Finding
from seamflow.inspect.learning import not_learning
from seamflow.inspect.progress import equal_groups_discarded, read_progress, with_counts
from seamflow.inspect.run_files import GrowingSteps
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

from services.launcher.service_clients import Services

_FILES = ("metrics.jsonl", "evaluation.jsonl")


class HealthNotes:
    """Looks at a run whenever its files or counts have changed."""

    def __init__(self, folder: Path, services: Services) -> None:
        self._folder, self._services = folder, services
        self._steps = GrowingSteps(folder / "metrics.jsonl")
        self._seen: tuple[int, ...] = ()
        self._found: dict[str, Finding] = {}

    async def look(self, ready: sample_pb.Readiness | None) -> list[str]:
        """A line for each new finding, and for each that is over."""
        seen = (*map(self._size, _FILES), *_counts(ready))
        if seen == self._seen or ready is None:
            return []
        self._seen = seen
        return self._news({finding.rule: finding for finding in await self.findings(ready)})

    async def findings(self, ready: sample_pb.Readiness | None) -> list[Finding]:
        """All of now; without the counts if the trajectory manager does not answer."""
        progress, number = read_progress(self._folder, self._steps), 0
        with suppress(grpc.aio.AioRpcError):
            tasks, run_id = self._services.tasks, self._services.run_id
            number = await equal_groups_discarded(tasks, run_id, progress, ready)
        return not_learning(with_counts(progress, ready, number))

    def _news(self, found: dict[str, Finding]) -> list[str]:
        new = [finding for name, finding in found.items() if name not in self._found]
        begun = [f"health ({each.rule}): {each.sentence} {each.cure}" for each in new]
        over = [f"health ({name}): over" for name in self._found if name not in found]
        self._found = found
        return begun + over

    def _size(self, name: str) -> int:
        file = self._folder / name
        return file.stat().st_size if file.is_file() else 0


def _counts(ready: sample_pb.Readiness | None) -> tuple[int, ...]:
    return () if ready is None else (ready.num_discarded_groups, ready.num_replaced_samples)
