"""Action lists on real ranks: gradients as without a pipeline, and no wait for the dead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from bench.fusion.gradients import GradientCase, gradient_difference, plan_actions, run_step
from bench.fusion.toy_models import Rows, ToyStage, make_rows, make_stages
from tests.lib.trainer.ranks.forked_ranks import exit_codes, run_forked
from trainer.pipeline.interpreter import PeerFailedError
from trainer.pipeline.layout import layout_of

UNEVEN = (2, 1, 3, 1)
NOTICED = 7


def join(timeout_seconds: float = 300.0) -> tuple[int, PrefixStore]:
    """Join the group of the environment; the rank, and a store beside the collectives."""
    torch.set_num_threads(1)
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group(
        "gloo",
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return rank, PrefixStore("commands", store)


def compare(exact: Sequence[GradientCase], rounded: Sequence[GradientCase]) -> None:
    """On one rank."""
    join()
    for case in exact:
        assert gradient_difference(case) == 0.0
    for case in rounded:
        assert gradient_difference(case) <= 1e-12


def test_gradients_are_those_of_the_whole_models() -> None:
    """Uneven stages and ragged micro-batches: bit for bit in float64, fused and one after the
    other; to rounding with replicas, whose gradients are added up.
    """
    exact = [GradientCase.planned(UNEVEN, (1, 2, 1, 1), 9, fused=fused) for fused in (True, False)]
    rounded = [GradientCase.planned(UNEVEN, (2, 1), 9), GradientCase.planned(UNEVEN, (3,), 5)]
    run_forked(4, compare, exact, rounded)


class Dying(ToyStage):
    """Ends its process in the middle of a step."""

    def forward(self, given: Rows, hidden: torch.Tensor | None) -> torch.Tensor:
        """Not even Python's own end of a process."""
        if hidden is not None and hidden.shape[1] > 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(given, hidden)


def lose_a_rank(folder: Path, watch: bool) -> None:
    """The last of three ranks dies; the others stay until both have noticed."""
    rank, store = join(300.0 if watch else 4.0)
    layout = layout_of(3, 0)
    actor = make_stages((1, 1, 1), 0, critic=False)
    if rank == 2:
        actor[2].__class__ = Dying
    actions = plan_actions(layout, 6, fused=False)[rank]  # no search: the same on each rank
    try:
        run_step(layout, actions, actor, [], make_rows(6, 0), store if watch else None)
    except PeerFailedError as error:
        (folder / f"rank_{rank}").write_text(str(error))
        wait_for(folder, range(2))
        os._exit(NOTICED)


def wait_for(folder: Path, ranks: Sequence[int]) -> None:
    """Until each has written its file."""
    while not all((folder / f"rank_{rank}").exists() for rank in ranks):
        time.sleep(0.05)


@pytest.mark.parametrize("watch", [True, False])
def test_the_death_of_a_rank_ends_the_wait_of_all(tmp_path: Path, watch: bool) -> None:
    """Rank 0 waits for rank 1, which lives: it learns of rank 2 from the command store.

    Negative control: without the store it waits for the timeout of the group.
    """
    assert exit_codes(3, lose_a_rank, tmp_path, watch) == [NOTICED, NOTICED, -signal.SIGKILL]
    assert "rank 2 is gone" in (tmp_path / "rank_1").read_text()
    of_others = (tmp_path / "rank_0").read_text()
    assert ("rank 2 is gone" in of_others) == watch, of_others
