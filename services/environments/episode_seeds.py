"""Seeds of episodes."""

from __future__ import annotations

import hashlib


def episode_seed(seed: int, task_id: str, rollout_id: str, *, per_task: bool = False) -> int:
    """A seed in [0, 2^32), as numpy's global one takes; equal for equal arguments, everywhere.

    Leased rollouts are named "<task>/<place in the group>/<attempt>": a replacement gets the seed
    of the rollout that it replaces.
    """
    place = "" if per_task else rollout_id.rpartition("/")[0]
    text = "\0".join((str(seed), task_id, place))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
