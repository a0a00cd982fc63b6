"""A checkpoint that a run cannot go on from."""

from __future__ import annotations

from services.chassis.errors import ConfigError


class WrongCheckpoint(ConfigError, ValueError):  # noqa: N818 -- names what it is
    """It is of another run, model or kind of training, or all are damaged: a restart helps not."""
