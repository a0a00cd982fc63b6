"""The rows of the index: a fixed number of bytes for each rollout.

A row of another length was written by another release, and counts as missing.
"""

from __future__ import annotations

import math
import struct

from trajectory_manager.model.rollout_summary import RolloutSummary

_ROW = struct.Struct("<4B2?I4q3dq")
_STEP = struct.Struct("<q")
DELETED = b"-"
"""The row of a rollout that was deleted."""


def packed(summary: RolloutSummary) -> bytes:
    """The row of a rollout; its step is last, so that a script can replace it."""
    reward = math.nan if summary.reward is None else summary.reward
    return _ROW.pack(*summary._replace(reward=reward)[1:])


def packed_step(step: int) -> bytes:
    """The end of a row."""
    return _STEP.pack(step)


def unpacked(rollout_id: str, row: bytes | None) -> RolloutSummary | None:
    """The rollout of a row; None: there is none that can be read."""
    if row is None or len(row) != _ROW.size:
        return None
    found = RolloutSummary(rollout_id, *_ROW.unpack(row))
    assert found.reward is not None, "a row has a number, which may be none"
    return found._replace(reward=None) if math.isnan(found.reward) else found
