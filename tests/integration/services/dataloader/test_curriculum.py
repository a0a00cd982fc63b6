"""Tasks that always fail or always succeed are submitted less often than the others."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.dataloader.config import DataloaderConfig
from services.dataloader.curriculum import Curriculum, Outcomes, SuccessRates
from tests.integration.services.dataloader.test_group_sizes import Growing, recorded
from tests.lib.dataloader.support import Queue, load, serving, write_jsonl
from tests.lib.ranker.support import manager, record

EPOCHS, SHARE = 200, 0.2
NAMES = ("hopeless", "solved", "mixed", "seldom")
KNOWN = {
    "hopeless": Outcomes(0.0, 4.0, 8),
    "solved": Outcomes(4.0, 4.0, 8),
    "mixed": Outcomes(2.0, 4.0, 8),
    "seldom": Outcomes(0.2, 4.0, 8),
}


def settings(**changes: Any) -> DataloaderConfig:
    """Of a curriculum; those of its table as they are."""
    given = {"share": SHARE, **changes.pop("curriculum", {})}
    return DataloaderConfig(run_id="run", tasks="t.jsonl", curriculum=given, **changes)


class Known(SuccessRates):
    """Outcomes that are given."""

    def __init__(self, outcomes: Mapping[str, Outcomes] = KNOWN) -> None:
        self._outcomes = dict(outcomes)

    async def refresh(self) -> None:
        """Nothing to see."""


def curriculum(rates: SuccessRates | None = None, **changes: Any) -> Curriculum:
    """One with known outcomes."""
    return Curriculum(settings(**changes), rates or Known())


def tasks(folder: Path) -> str:
    """A file with a task of each kind."""
    rows = [{"task_id": name, "payload": {}} for name in NAMES]
    return write_jsonl(folder / "t.jsonl", rows)


def counts(ids: list[str]) -> Counter[str]:
    """In how many epochs each task was submitted."""
    assert len(set(ids)) == len(ids)
    return Counter(name.partition("@")[0] for name in ids)


@pytest.mark.parametrize("has_curriculum", [True, False])
async def test_hopeless_and_solved_tasks_are_drawn_less_often(
    tmp_path: Path, has_curriculum: bool
) -> None:
    """By what a manager recorded; control: without a curriculum all are drawn in each epoch."""
    async with (
        manager("run", group_size=8) as (address, stub),
        grpc.aio.insecure_channel(address) as channel,
        serving(queue := Queue()) as queue_address,
    ):
        groups = [
            recorded("hopeless@0", [0.0] * 8),
            recorded("solved@0", [1.0] * 8),
            recorded("mixed@0", [1.0, 0.0] * 4),
            recorded("seldom@0", [1.0] + [0.0] * 7),
        ]
        await record(stub, "run", groups)
        drawing = curriculum(SuccessRates(settings(), channel)) if has_curriculum else None
        await load(queue_address, curriculum=drawing, tasks=tasks(tmp_path), epochs=EPOCHS)
    found = counts(queue.ids)
    assert (found["mixed"], found["seldom"]) == (EPOCHS, EPOCHS)
    for name in ("hopeless", "solved"):
        if has_curriculum:
            assert abs(found[name] - SHARE * EPOCHS) < 4 * math.sqrt(SHARE * EPOCHS)
        else:
            assert found[name] == EPOCHS


def drawn(found: Curriculum, name: str) -> list[int]:
    """The epochs in which a task is drawn."""
    return [epoch for epoch in range(EPOCHS) if found.is_drawn(f"{name}@{epoch}")]


def test_the_epochs_depend_on_the_seed_alone() -> None:
    """The same after a restart, others with another seed and for another task."""
    epochs = drawn(curriculum(seed=1), "hopeless")
    assert drawn(curriculum(seed=1), "hopeless") == epochs
    assert drawn(curriculum(seed=2), "hopeless") != epochs
    assert drawn(curriculum(seed=1), "solved") != epochs


def test_limits_and_least_rollouts_decide() -> None:
    """A task at a limit is passed over; one that is hardly known or unknown is not."""
    every = list(range(EPOCHS))
    assert drawn(curriculum(), "seldom") == every
    assert drawn(curriculum(curriculum={"lowest": 0.05}), "seldom") != every
    assert drawn(curriculum(curriculum={"highest": 0.5}), "mixed") != every
    assert drawn(curriculum(curriculum={"min_rollouts": 9}), "hopeless") == every
    assert drawn(curriculum(), "new") == every


def test_a_task_that_starts_to_succeed_is_drawn_again() -> None:
    """The newer rollouts decide; at least `share` of the epochs find that out."""
    outcomes = KNOWN["hopeless"]
    found = curriculum(Known({"hopeless": outcomes.added(1.0)}))
    assert drawn(found, "hopeless") == list(range(EPOCHS))


async def test_a_crash_anywhere_draws_the_same_tasks(tmp_path: Path) -> None:
    """Killed at each of several moments and resumed: those of a run without a crash."""
    given: dict[str, Any] = {"tasks": tasks(tmp_path), "epochs": 20, "shuffle": True}
    stored: dict[str, Any] = {"state_file": tmp_path / "state.json", "resume": True}
    whole, queue = Queue(), Queue(capacity=0)
    async with serving(whole) as address:
        await load(address, curriculum=curriculum(), **given)
    async with serving(queue) as address:
        for queue.capacity in (1, 7, 13, 31):
            loading = asyncio.create_task(load(address, curriculum=curriculum(), **given, **stored))
            await queue.until(queue.capacity)
            loading.cancel()
            await asyncio.wait([loading])
        queue.capacity = 1000
        await load(address, curriculum=curriculum(), **given, **stored)
    assert queue.ids == whole.ids
    assert len(whole.ids) < 20 * len(NAMES)


async def test_only_drawn_tasks_get_a_size(tmp_path: Path) -> None:
    """And none of a task that was passed over stays in the position."""
    state = tmp_path / "state.json"
    given: dict[str, Any] = {"max_samples": 999, "state_file": state, "resume": True, "epochs": 10}
    async with serving(queue := Queue()) as address:
        await load(address, Growing(1), curriculum(), tasks=tasks(tmp_path), **given)
    sizes = [task.num_samples for task in queue.tasks.values()]
    assert sizes == list(range(2, 2 + len(queue.tasks)))
    assert "sizes" not in json.loads(state.read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curriculum": {"share": 0.0}}, r"(?s)curriculum\.share.*greater than 0"),
        ({"curriculum": {"share": 1.5}}, r"(?s)curriculum\.share.*less than or equal to 1"),
        ({"curriculum": {"lowest": 1.0}}, r"curriculum\.lowest is 1\.0: give less than"),
        ({"purpose": "eval"}, r"curriculum\.share is 0\.2 and purpose is eval"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    """With the value and the cure."""
    with pytest.raises(ValueError, match=message):
        settings(**changes)
