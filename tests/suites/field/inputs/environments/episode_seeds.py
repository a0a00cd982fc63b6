"""Seeds of episodes: what numpy, random and JSON readers of other languages take."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import strategies

from services.environments.episode import episode_seed
from tests.suites.field.kind import Kind


def check(given: tuple[int, str, str]) -> None:
    """Below 2^32, taken by each generator, and the same for a replaced rollout."""
    seed, task_id, rollout = given
    found = episode_seed(seed, task_id, f"{rollout}/1")
    np.random.seed(found)
    np.random.default_rng(found)
    random.seed(found)
    if not 0 <= found < 2**32 or found != episode_seed(seed, task_id, f"{rollout}/2"):
        raise AssertionError(f"seed {found}")


KINDS = (
    Kind(
        name="episode seeds",
        check=check,
        examples=[(0, "t", "t/0"), (2**63 - 1, "t", "t/1")],
        generated=strategies.tuples(
            strategies.integers(0, 2**63 - 1), strategies.text(), strategies.text()
        ),
    ),
)
