"""Which nodes train, by their roofline."""

from __future__ import annotations

from scheduler.policy.placement import train_priority

H800 = (3.35e12, 989e12)
H20 = (4.0e12, 148e12)
A100 = (2.04e12, 312e12)


def test_nodes_with_more_flops_for_their_bandwidth_train_first() -> None:
    """Compute-rich H800 trains, bandwidth-rich H20 generates, as in StreamRL's two datacentres."""
    assert train_priority(*H800) > train_priority(*A100) > train_priority(*H20) > 1


def test_it_does_not_matter_how_many_devices_a_node_has() -> None:
    """What counts is which work suits the node, not how big it is."""
    bandwidth, flops = H800
    assert train_priority(8 * bandwidth, 8 * flops) == train_priority(bandwidth, flops)


def test_unknown_hardware_has_no_priority() -> None:
    """The contract's 0."""
    assert train_priority(0.0, 989e12) == train_priority(3.35e12, 0.0) == 0.0
