"""Runs of one and two ranks are the same, packed and padded."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.lib.mostly_long import mostly_long
from tests.lib.trainer.ranks.whole_run import greatest_difference, losses, run
from tests.lib.trainer.support import JOB_CONFIG
from tests.lib.trainer.support import ROUNDING as OF_A_RUN
from tests.unit.trainer.model.test_packing import packing


@pytest.mark.parametrize(
    "setting",
    [
        {"batch__packing": False},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_offload": True},
        {"batch__logit_tokens": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", mostly_long([1, 2], 1, short=__file__))
def test_a_run_is_the_same_packed_padded_and_with_less_memory(
    model: Path, straight_run: Path, tmp_path: Path, ranks: int, setting: dict[str, int]
) -> None:
    """Ten steps to rounding; padding is seen in what was computed."""
    other = run(ranks, model, tmp_path, steps=list(range(1, 11)), config={**JOB_CONFIG, **setting})
    assert losses(other) == pytest.approx(losses(straight_run), abs=OF_A_RUN)
    assert greatest_difference(other, straight_run) < OF_A_RUN
    packed = fmean(packing(straight_run))
    assert (fmean(packing(other)) < 1.0 < packed) == ("batch__packing" in setting)
