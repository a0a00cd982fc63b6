"""Which rollout server gets a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.chassis import plugins
from services.chassis.errors import ConfigError

__all__ = ["Candidate", "DispatchPolicy", "load_dispatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A server that may take the turn: it serves, and reports an allowed version."""

    server_id: str
    """Its name."""
    num_turns: int
    """Turns this gateway has there, or the server's own count where that is higher."""
    max_running: int
    """Turns its engine decodes at once."""
    tokens_per_second: float
    """Its recent decoding rate; 0: not known yet."""


class DispatchPolicy(Protocol):
    """Chooses one of at least one candidates."""

    def __call__(self, candidates: Sequence[Candidate]) -> Candidate:
        """Pick the server for the next turn."""
        ...


def least_load(candidates: Sequence[Candidate]) -> Candidate:
    """The server with the smallest share of its slots taken."""
    return min(candidates, key=lambda c: (c.num_turns / max(c.max_running, 1), c.server_id))


BUILT_IN: dict[str, DispatchPolicy] = {"least_load": least_load}


def load_dispatch(name: str) -> DispatchPolicy:
    """A built-in by name, or anyone's own by "package.module:Name"."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigError(
            f"dispatch {name!r} is unknown: one of {sorted(BUILT_IN)}, or 'package.module:Name'"
        )
    policy: DispatchPolicy = plugins.load(name)
    return policy
