"""The table of devices."""

from __future__ import annotations

import pytest

from services.chassis.errors import UsageError
from tools.forecast.devices import device, devices


def test_every_device_has_figures_of_its_order() -> None:
    """Read as the command reads them: bytes, FLOP/s, bytes a second, dollars."""
    for each in devices().values():
        assert each.usable_bytes < each.memory_bytes < 1e12
        assert each.float32_flops < each.flops < 1e16
        assert each.host_link <= each.network * 4
        assert each.network < each.bandwidth < 1e14
        assert 0 < each.price < 100


def test_an_unknown_device_lists_those_that_are_known() -> None:
    """With the nearest name; control: that one is known."""
    with pytest.raises(UsageError, match=r"give one of h100-80.*did you mean l40s-48"):
        device("l40s")
    assert device("l40s-48").name == "l40s-48"
