"""The trial of a step that ended trainer after trainer: its groups one by one.

A mark beside the checkpoints names the group that is being tried. If the process ends there, the
next one finds the mark and rejects that group.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer import fsync_files
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.data.token_sequence import TokenSequence
from trainer.leasing.accepted_samples import AcceptedSamples
from trainer.step.step_runner import StepRunner

_TRIAL_DELIVERIES = 3
"""When the trainer starts with a step that this many trainers got and none committed, it tries
the step's groups one by one and replaces one that ends the process."""

_MARK = "trial.json"


class Trial:
    """Tries the newest step that was leased and never committed."""

    def __init__(
        self,
        config: TrainerConfig,
        samples: SampleClient,
        accepted: AcceptedSamples,
        steps: StepRunner,
    ) -> None:
        self._samples, self._accepted, self._steps = samples, accepted, steps
        self._mark = config.checkpoint.folder / _MARK

    async def is_due(self) -> bool:
        """Whether a step ended enough trainers, or one of them in a trial."""
        if not self._samples.newest_pending:
            return False
        leased = await self._samples.read_pending(self._samples.newest_pending)
        return self._marked_group() is not None or leased.num_deliveries >= _TRIAL_DELIVERIES

    async def run(self) -> None:
        """Reject the groups that end the process or give no finite gradient."""
        step = self._samples.newest_pending
        if (group_id := self._marked_group()) is not None:
            message = (
                f"the trainer ended while it computed the gradient of this group of step {step}"
            )
            await self._accepted.reject(step, {group_id: message})
        rejected = await self._try(step, await self._sequences(step))
        if rejected:
            await self._accepted.reject(step, rejected)
        self._mark.unlink(missing_ok=True)

    async def _sequences(self, step: int) -> list[TokenSequence]:
        sequences = None
        while sequences is None:
            leased = await self._samples.read_pending(step)
            sequences = await self._accepted.read(step, leased)
        return sequences

    async def _try(self, step: int, sequences: Sequence[TokenSequence]) -> dict[str, str]:
        """By group whose gradient is not finite: why."""
        rejected = {}
        for group_id, members in groupby(sequences, lambda item: item.group_id):
            _write_mark(self._mark, {"step": step, "group_id": group_id})
            try:
                found = await self._steps.try_group(step, list(members))
            except asyncio.CancelledError:
                self._mark.unlink(missing_ok=True)  # ended from outside
                raise
            if found:
                rejected[group_id] = found
        return rejected

    def _marked_group(self) -> str | None:
        """The group of the newest pending step whose trial ended an earlier process."""
        try:
            mark = json.loads(self._mark.read_text())
        except (FileNotFoundError, ValueError):
            return None
        is_pending = mark["step"] == self._samples.newest_pending
        return str(mark["group_id"]) if is_pending else None


def _write_mark(path: Path, mark: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    fsync_files.write_json(partial, mark)
    partial.rename(path)
    fsync_files.sync(path.parent)
