"""Whether weights have a value that no model computes with, in every type they come in."""

from __future__ import annotations

import pytest
import torch

from rollout.server.engines.torch.weight_reader import is_finite

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_one_bad_value_anywhere_is_found(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.linspace(-3, 3, 1001).to(dtype)
    assert is_finite(tensor)
    tensor[place] = value
    assert not is_finite(tensor)


def test_extremes_of_the_type_are_finite_and_whole_numbers_too() -> None:
    for dtype in TYPES:
        limits = torch.finfo(dtype)
        assert is_finite(torch.tensor([limits.min, limits.max], dtype=dtype))
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.tensor([True]))
    assert is_finite(torch.empty(0))
