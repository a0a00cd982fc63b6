"""Negative control: an environments process that takes a failure for a reward of 0."""

from __future__ import annotations

from seamflow.client import Rollout

from services.environments.cli import main
from services.environments.episode_loop import EpisodeLoop


async def _finish_with_zero(self: EpisodeLoop, rollout: Rollout, error: Exception) -> None:
    await rollout.finish({"reward": 0.0})


if __name__ == "__main__":
    EpisodeLoop._fail = _finish_with_zero  # type: ignore[method-assign]
    main()
