"""The fixtures that the tests of the trainer share with other tiers."""

from __future__ import annotations

from tests.lib.trainer.fixtures import model, straight_run, training

__all__ = ["model", "straight_run", "training"]
