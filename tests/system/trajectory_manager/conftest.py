"""The fixtures that the tests of the trajectory manager share with other tiers."""

from __future__ import annotations
