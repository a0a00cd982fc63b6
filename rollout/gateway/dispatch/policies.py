"""Which waiting turn is next, and which rollout server gets it."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from services.chassis import plugins

if TYPE_CHECKING:
    from services.lib.decode_latency import DecodeLatency

__all__ = [
    "CacheFirst",
    "Candidate",
    "DispatchPolicy",
    "LeastLoad",
    "LongestFirst",
    "PlanningPolicy",
    "PoolSnapshot",
    "PrefixAffinity",
    "TurnRequest",
    "least_loaded",
    "load_dispatch",
]

_BALANCE = 1.25
_PATIENCE_SECONDS = 30.0
_HALF_TOKENS = 1024
_MOST_REMEMBERED = 1 << 16
"""Rollouts; a forgotten one is computed again once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A turn, or the rest of one, that needs a server."""

    group: str
    """The task of its rollout, or the rollout: turns of a group begin with the same tokens."""
    rollout: str
    """Its rollout: a turn begins with all of that one's turns before it."""
    num_tokens: int
    """Length in tokens of the prefix that the server continues."""
    max_new_tokens: int
    """Most tokens it may sample."""
    expected_tokens: float
    """Tokens that it will probably sample, at most `max_new_tokens`."""
    continues: bool = False
    """Whether a server gave it up: the rest of a turn, not a new one."""
    required_weight_version: int = 0
    """Servers with older weights are not asked: its group would be too old to be trained."""
    arrived: float = 0.0
    """When it began to wait, in seconds of a clock that never goes back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A server that may take the turn: it has room, serves, and reports an allowed version."""

    server_id: str
    """Its name."""
    num_turns: int
    """Turns it has, of this gateway and of others."""
    max_running: int
    """Turns its engine decodes at once."""
    tokens_per_second: float
    """Its recent decoding rate; 0: not known yet."""
    load: float = field(init=False)
    """The share of its slots that is taken; more than 1 while turns queue in its engine."""

    def __post_init__(self) -> None:
        # Computed once: a turn is compared on dozens of servers.
        object.__setattr__(self, "load", self.num_turns / _slots(self))


class DispatchPolicy(Protocol):
    """Decides which of the waiting turns is next, and chooses among the servers with room."""

    def order(self, turn: TurnRequest) -> float:
        """Where `turn` waits: least first, ties by arrival. Asked once, when it arrives."""
        ...

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """Pick one of at least one servers for `turn`: one of these very objects.

        None: none of them, it waits on, and with it all behind it. Asked again when a turn has
        left a server, so never None where a candidate has no turn at all.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """All that a gateway has to give out, and to whom."""

    num_waiting: int
    """Turns without a server."""
    servers: Sequence[Candidate]
    """Every server that may serve, whether it has room or not."""
    latency: DecodeLatency | None = None
    """Decode latency of a server as configured; None: it is not."""


@runtime_checkable
class PlanningPolicy(Protocol):
    """What a dispatch policy may be besides: one that prepares for all turns at once."""

    def plan(self, pool: PoolSnapshot) -> None:
        """Called when the number of turns has changed by an eighth, and every second."""
        ...


class LeastLoad:
    """In order of arrival, to the server with the smallest share of its slots taken."""

    def order(self, turn: TurnRequest) -> float:
        """Turns that a server gave up come first: somebody has waited for them already."""
        return -math.inf if turn.continues else 0.0

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        """The least loaded server."""
        return least_loaded(candidates)


class PrefixAffinity(LeastLoad):
    """In order of arrival, to the server that has the group's prefix cached."""

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        """A group's own server while that is not much busier than others.

        Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): no server has
        more than 1.25 times its share of all turns; what is beyond goes to the group's next server.
        Servers that come or go move the groups of no other server.
        """
        return _ranked(turn.group, _with_room(candidates))


class CacheFirst(LeastLoad):
    """The longest prefix first, to the server that has it cached.

    For agents of many turns: those that are far get on, so that a server works through few rollouts
    whose keys and values fit, instead of computing those of many again at each turn. What a rollout
    has said so far outweighs what its group has in common: it stays where it was last. By their
    group rollouts would wander, as its server is too busy for most of them.
    """

    def __init__(self) -> None:
        """Nobody was anywhere yet."""
        self._last: OrderedDict[str, str] = OrderedDict()

    def order(self, turn: TurnRequest) -> float:
        """A rollout that has begun never waits for one that has not."""
        return -math.inf if turn.continues else -float(turn.num_tokens)

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        """The rollout's last server, or another, within bounded loads as of `PrefixAffinity`."""
        with_room = _with_room(candidates)
        last = self._last.pop(turn.rollout, None)
        chosen = next((c for c in with_room if c.server_id == last), None)
        chosen = chosen or _ranked(turn.rollout, with_room)
        self._last[turn.rollout] = chosen.server_id
        if len(self._last) > _MOST_REMEMBERED:
            self._last.popitem(last=False)
        return chosen


class LongestFirst(LeastLoad):
    """Longest expected turn first, so that none of them is left alone at the end of a step.

    Longest processing time first keeps the end within 4/3 of the best one (Graham 1969).
    """

    def order(self, turn: TurnRequest) -> float:
        """A turn counts as come earlier the longer it is expected to be, by less than 30 seconds.

        So of those that come together the longest goes first, and no turn, however short, is ever
        overtaken by a new one that came 30 seconds after it.
        """
        if turn.continues:
            return -math.inf
        share = turn.expected_tokens / (turn.expected_tokens + _HALF_TOKENS)
        return turn.arrived - _PATIENCE_SECONDS * share


BUILT_IN = {
    "least_load": f"{__name__}:LeastLoad",
    "prefix_affinity": f"{__name__}:PrefixAffinity",
    "longest_first": f"{__name__}:LongestFirst",
    "cache_first": f"{__name__}:CacheFirst",
    "skew_aware": "rollout.gateway.dispatch.skew_aware:SkewAware",
}


def load_dispatch(name: str) -> DispatchPolicy:
    """A built-in by name, or what anyone's own "package.module:Name" makes without arguments."""
    policy: DispatchPolicy = plugins.make("dispatch", name, BUILT_IN)
    return policy


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """The server with the smallest share of its slots taken."""
    return min(candidates, key=attrgetter("load", "server_id"))


def _slots(candidate: Candidate) -> int:
    return max(candidate.max_running, 1)


def _with_room(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that are not much busier than others."""
    share = (1 + sum(c.num_turns for c in candidates)) / sum(map(_slots, candidates))
    return [c for c in candidates if c.num_turns < math.ceil(_BALANCE * share * _slots(c))]


def _ranked(name: str, candidates: Sequence[Candidate]) -> Candidate:
    """The one that ranks highest for `name`."""
    return max(candidates, key=lambda c: _rank(name, c.server_id))


def _rank(name: str, server_id: str) -> bytes:
    return hashlib.blake2b(f"{name}\0{server_id}".encode(), digest_size=8).digest()
