"""A rank that is killed in mid-step: the others go on without it, and it joins again."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.lib.trainer.ranks.forked_ranks import run_forked
from tests.lib.trainer.support import JOB_CONFIG
from tests.system.trainer.ranks.mortal_run import Death, run_mortal

STEPS, KILL_STEP = 5, 2
CONFIG = {**JOB_CONFIG, "replicas": 2}
BETA1 = 0.9


def job(model: Path, out: Path, *deaths: Death) -> dict[str, Any]:
    """Five steps of two parts each, on two replicas."""
    values = {"config": CONFIG, "model": str(model), "out": str(out), "steps": STEPS}
    return {**values, "deaths": deaths}


def train(model: Path, out: Path, *deaths: Death, **others: object) -> Path:
    """The job, to its end."""
    out.mkdir()
    run_forked(4, run_mortal, {**job(model, out, *deaths), **others})
    return out


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which nobody dies."""
    return train(model, tmp_path_factory.mktemp("lost") / "undisturbed")


def recorded(folder: Path, name: str) -> list[Any]:
    """What rank 0 left: losses of the steps, or sizes of the groups that were formed."""
    found: list[Any] = json.loads((folder / "lead.json").read_text())[name]
    return found


def lives(folder: Path) -> list[int]:
    """In which of its lives each rank ended."""
    return [json.loads((folder / f"rank_{rank}.json").read_text())["life"] for rank in range(4)]


def whole(folder: Path, key: str) -> torch.Tensor:
    """All tensors of a kind in a state, as one vector."""
    parts: dict[str, list[torch.Tensor]] = {}
    for path in sorted(folder.glob("rank_*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it is no mapping
                if name.startswith(f"{key}."):
                    parts.setdefault(name, []).append(file.get_tensor(name))
    return torch.cat([torch.cat(parts[name]).flatten() for name in sorted(parts)])


def gradient(folder: Path, step: int) -> torch.Tensor:
    """Of a step, from AdamW's means after it and before it."""
    before = whole(folder / f"state_{step - 1}", "exp_avg")
    return (whole(folder / f"state_{step}", "exp_avg") - BETA1 * before) / (1 - BETA1)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the greatest element."""
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.long(short="tests/system/trainer/ranks/test_lost_rank.py")
def test_steps_in_which_ranks_are_killed_are_those_of_the_whole_batch(
    model: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """Wherever they die; the others are the same processes, and each joins again."""
    deaths = {
        # In the backward pass of the second part: both parts are computed by three ranks.
        Death(rank=3, kind="Accumulate", number=2 * KILL_STEP): [3, 4],
        # Of rank 0's replica, among the collectives of the update.
        Death(rank=1, kind="Measure", number=3): [3, 4],
        # The others do without it, so that the step is done.
        Death(rank=2, kind="Optimize", number=4): [4],
        # In its second life, when the devices are lent: it is missed in the step after that.
        Death(rank=2, life=2, kind="Release", number=1): [3, 4],
        # In its second life, whose first state was that of step 3.
        Death(rank=1, life=2, kind="Save", number=3): [3],
    }
    found = train(model, tmp_path / "out", *deaths)
    assert lives(found) == [1, 3, 3, 2]
    assert recorded(found, "sizes") == list(chain(*deaths.values()))
    assert recorded(found, "losses") == pytest.approx(recorded(undisturbed, "losses"), rel=1e-6)
    for step in range(KILL_STEP, STEPS + 1):
        expected = gradient(undisturbed, step)
        assert expected.abs().max() > 1e-3
        assert difference(gradient(found, step), expected) < 1e-6
    for key in ("parameter", "exp_avg_sq"):
        end = whole(undisturbed / f"state_{STEPS}", key)
        assert difference(whole(found / f"state_{STEPS}", key), end) < 1e-6


def test_a_part_that_is_not_computed_again_is_noticed(
    model: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """Negative control: what the ranks had before the loss is gone."""
    death = Death(rank=3, kind="Accumulate", number=2 * KILL_STEP)
    found = train(model, tmp_path / "out", death, forgets_parts=True)
    assert recorded(found, "sizes") == [3, 4]
    expected = gradient(undisturbed, KILL_STEP)
    assert difference(gradient(found, KILL_STEP), expected) > 1e-2


@pytest.mark.long(short="tests/system/trainer/ranks/test_lost_rank.py")
def test_the_loss_of_all_copies_of_a_part_is_an_error(model: Path, tmp_path: Path) -> None:
    """Two ranks that have the same part die at once: the trainer restarts from its checkpoint."""
    deaths = [Death(rank=rank, kind="Accumulate", number=2 * KILL_STEP) for rank in (1, 3)]
    found = train(model, tmp_path / "out", *deaths)
    assert "the only copy" in json.loads((found / "lead.json").read_text())["error"]


def test_ranks_that_are_left_get_the_rows_of_mini_batches_again(
    model: Path, tmp_path: Path
) -> None:
    """A rank dies after it predicted and before any update: the step begins anew without it."""
    often = {**CONFIG, "algorithm__num_epochs": 2, "algorithm__num_mini_batches": 2}
    death = Death(rank=3, kind="Accumulate", number=1)
    undisturbed = train(model, tmp_path / "undisturbed", config=often, steps=2)
    found = train(model, tmp_path / "out", death, config=often, steps=2)
    assert recorded(found, "sizes") == [3, 4]
    assert recorded(found, "losses") == pytest.approx(recorded(undisturbed, "losses"), rel=1e-6)
    end = whole(undisturbed / "state_2", "parameter")
    assert difference(whole(found / "state_2", "parameter"), end) < 1e-6


@pytest.mark.long(short="tests/system/trainer/ranks/test_lost_rank.py")
def test_a_rank_without_its_context_group_waits_for_the_others(
    model: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """Of two pairs one loses a rank: the other pair computes all rows of the step."""
    together = {**CONFIG, "context_parallel": 2}
    death = Death(rank=3, kind="Accumulate", number=2 * KILL_STEP)
    found = train(model, tmp_path / "out", death, config=together, steps=KILL_STEP)
    assert recorded(found, "sizes") == [3, 4]
    assert recorded(found, "losses") == pytest.approx(
        recorded(undisturbed, "losses")[:KILL_STEP], rel=1e-6
    )
    expected = gradient(undisturbed, KILL_STEP)
    assert difference(gradient(found, KILL_STEP), expected) < 1e-6
