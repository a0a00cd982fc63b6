"""The fixtures that the tests of the trajectory manager share with other tiers."""

from __future__ import annotations

from tests.lib.trajectory_manager.fixtures import replicas, run, store

__all__ = ["replicas", "run", "store"]
