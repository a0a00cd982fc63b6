"""Which rollout server gets a turn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.chassis import plugins
from services.chassis.errors import ConfigError

__all__ = ["Ask", "Candidate", "DispatchPolicy", "least_load", "load_dispatch", "prefix_affinity"]

_BALANCE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A turn, or the rest of one, that needs a server."""

    group: str
    """The task of its rollout, or the rollout: turns of a group begin with the same tokens."""
    num_tokens: int
    """Length in tokens of the prefix that the server continues."""
    max_new_tokens: int
    """Most tokens it may sample."""


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

    def __call__(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """Pick the server for `ask`."""
        ...


def least_load(ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
    """The server with the smallest share of its slots taken."""
    return min(candidates, key=lambda c: (c.num_turns / _slots(c), c.server_id))


def prefix_affinity(ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
    """A group's own server, which has its prefix cached, while that is not much busier than others.

    Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): no server has more
    than 1.25 times its share of all turns; what is beyond goes to the group's next server. Servers
    that come or go move the groups of no other server.
    """
    share = (1 + sum(c.num_turns for c in candidates)) / sum(map(_slots, candidates))
    with_room = [c for c in candidates if c.num_turns < math.ceil(_BALANCE * share * _slots(c))]
    return max(with_room, key=lambda c: _rank(ask.group, c.server_id))


BUILT_IN: dict[str, DispatchPolicy] = {
    "least_load": least_load,
    "prefix_affinity": prefix_affinity,
}


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


def _slots(candidate: Candidate) -> int:
    return max(candidate.max_running, 1)


def _rank(group: str, server_id: str) -> bytes:
    return hashlib.blake2b(f"{group}\0{server_id}".encode(), digest_size=8).digest()
