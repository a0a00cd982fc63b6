"""The fixtures that the tests of the trainer share with other tiers."""

from __future__ import annotations
