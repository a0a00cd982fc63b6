"""Roles for the tests of placement."""

from __future__ import annotations

from typing import Any

from scheduler.model.stage_profile import StageProfile
from tools.planning.dataflow import Role


def role(tag: str, node_seconds: float, *, fewest: int = 1, **fields: Any) -> Role:
    """A role that 1,000 nodes share perfectly, from `fewest` nodes on."""
    table = {count: node_seconds / count for count in (*range(fewest, fewest + 16), 1000)}
    return Role(tag=tag, profile=StageProfile.of(table), **fields)
