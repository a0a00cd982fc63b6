"""Dispatch policies: which waiting turn is next, and which rollout server gets it."""

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

_BALANCE = 1.25
_MAX_OVERTAKE_SECONDS = 30.0
_HALF_TOKENS = 1024
_MAX_REMEMBERED = 1 << 16
"""Rollouts whose server is remembered; the cache of a forgotten one is computed again once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A turn, or the rest of one, that waits for a server."""

    group: str
    """The task of its rollout, or the rollout itself: turns of a group share a prefix."""
    rollout: str
    """Its rollout: a turn's prefix contains the rollout's earlier turns."""
    num_tokens: int
    """Length of the prefix that the server continues, in tokens."""
    max_new_tokens: int
    """Limit of the tokens it may sample."""
    expected_tokens: float
    """Predicted number of tokens it samples, at most `max_new_tokens`."""
    continues: bool = False
    """Whether it is the rest of a turn that another server has not finished."""
    num_sampled: int = 0
    """Tokens that other servers have sampled of it."""
    required_weight_version: int = 0
    """Servers with older weights are excluded: the group would be too stale to train on."""
    pinned_weight_version: int | None = None
    """The only weight version that may sample it; None if any allowed one may."""
    avoided: frozenset[str] = frozenset()
    """Addresses of servers that have failed it: it goes there only if no other serves."""
    arrived: float = 0.0
    """When it began to wait, in seconds of a monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A server that may take the turn: serving, below its limit, with an allowed version."""

    server_id: str
    num_turns: int
    """Turns on it, of this gateway and of others."""
    max_running: int
    """Turns its engine decodes concurrently."""
    tokens_per_second: float
    """Its recent decoding rate; 0: unknown."""
    load: float = field(init=False)
    """Share of its slots in use; more than 1 while turns queue in its engine."""

    def __post_init__(self) -> None:
        # Computed once: a policy compares dozens of candidates for each turn.
        object.__setattr__(self, "load", self.num_turns / _slots(self))


class DispatchPolicy(Protocol):
    """Orders the waiting turns and chooses among the servers that can take one."""

    def order(self, turn: TurnRequest) -> float:
        """Sort key of `turn`: smallest first, ties by arrival. Called once, when it arrives."""
        ...

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return one of `candidates` (at least one is given), or None: `turn` keeps waiting.

        None also holds back the turns queued after it. It is called again when a server loses a
        turn, so it must not return None while a candidate has no turn at all.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """State of a gateway's servers and of its queue."""

    num_waiting: int
    """Turns that wait for a server."""
    servers: Sequence[Candidate]
    """All servers with allowed weights, full ones included."""
    latency: DecodeLatency | None = None
    """Configured decode latency of a server; None: not configured."""


@runtime_checkable
class PlanningPolicy(Protocol):
    """A dispatch policy that also plans for all turns together."""

    def plan(self, pool: PoolSnapshot) -> None:
        """Called when the number of turns has changed by an eighth, and every second."""
        ...


class LeastLoad:
    """First come, first served; to the server with the smallest share of its slots in use."""

    def order(self, turn: TurnRequest) -> float:
        """Continued turns first: their agents have waited already."""
        return -math.inf if turn.continues else 0.0

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        return least_loaded(candidates)


class PrefixAffinity(LeastLoad):
    """First come, first served; to the server that has the group's prefix cached."""

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        """The group's home server, unless it is much busier than others.

        Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): no server has
        more than 1.25 times its share of all turns; further turns go to the group's next server. A
        server that joins or leaves moves no groups between the others.
        """
        return _ranked(turn.group, _within_bound(candidates))


class CacheFirst(LeastLoad):
    """The longest prefix first, to the server that has it cached.

    For agents of many turns: rollouts that have progressed furthest continue, so that a server
    finishes a few rollouts whose keys and values fit in its cache instead of recomputing those of
    many. A rollout stays on its last server, because its own history is longer than the prefix it
    shares with its group, whose home server would be too busy for most of its rollouts.
    """

    def __init__(self) -> None:
        """No rollout has a last server yet."""
        self._last: OrderedDict[str, str] = OrderedDict()

    def order(self, turn: TurnRequest) -> float:
        """A rollout that has begun is served before one that has not."""
        return -math.inf if turn.continues else -float(turn.num_tokens)

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        """The rollout's last server, or another, with the bounded loads of `PrefixAffinity`."""
        available = _within_bound(candidates)
        last = self._last.pop(turn.rollout, None)
        chosen = next((c for c in available if c.server_id == last), None)
        chosen = chosen or _ranked(turn.rollout, available)
        self._last[turn.rollout] = chosen.server_id
        if len(self._last) > _MAX_REMEMBERED:
            self._last.popitem(last=False)
        return chosen


class LongestFirst(LeastLoad):
    """Longest expected turn first, so that no long turn is left alone at the end of a step.

    Longest processing time first ends within 4/3 of the optimum (Graham 1969).
    """

    def order(self, turn: TurnRequest) -> float:
        """Arrival time, moved back by up to 30 seconds the longer the turn is expected to be.

        So the longest of concurrent arrivals is first, and no turn is overtaken by one that arrived
        30 seconds later.
        """
        if turn.continues:
            return -math.inf
        share = turn.expected_tokens / (turn.expected_tokens + _HALF_TOKENS)
        return turn.arrived - _MAX_OVERTAKE_SECONDS * share


BUILT_IN = {
    "least_load": f"{__name__}:LeastLoad",
    "prefix_affinity": f"{__name__}:PrefixAffinity",
    "longest_first": f"{__name__}:LongestFirst",
    "cache_first": f"{__name__}:CacheFirst",
    "skew_aware": "rollout.gateway.dispatch.skew_aware:SkewAware",
}


def load_dispatch(name: str) -> DispatchPolicy:
    """A built-in policy, or the plug-in "package.module:Name", constructed without arguments."""
    policy: DispatchPolicy = plugins.make("dispatch", name, BUILT_IN)
    return policy


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """The server with the smallest share of its slots in use."""
    return min(candidates, key=attrgetter("load", "server_id"))


def _slots(candidate: Candidate) -> int:
    return max(candidate.max_running, 1)


def _within_bound(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with less than 1.25 times their share of all turns."""
    share = (1 + sum(c.num_turns for c in candidates)) / sum(map(_slots, candidates))
    return [c for c in candidates if c.num_turns < math.ceil(_BALANCE * share * _slots(c))]


def _ranked(name: str, candidates: Sequence[Candidate]) -> Candidate:
    """Rendezvous hashing: the candidate with the highest hash for `name`."""
    return max(candidates, key=lambda c: _rank(name, c.server_id))


def _rank(name: str, server_id: str) -> bytes:
    return hashlib.blake2b(f"{name}\0{server_id}".encode(), digest_size=8).digest()
