"""Outlier ejection: a server whose turns fail leaves the choice, and comes back by probes.

IN_USE -> EJECTED, for a time that doubles -> PROBED, one turn at a time -> IN_USE
             ^------------- a failed probe -----------'

Terms and bounds are those of Envoy's outlier detection (consecutive errors, base and maximum
ejection time, maximum share of ejected hosts).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from seamflow.durations import to_duration
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway import limits
from services.chassis import metrics
from services.chassis.log import get_logger

if TYPE_CHECKING:
    from rollout.gateway.dispatch.server_state import Server

_log = get_logger()
_FORGIVEN = 0.5
"""Failures that a good turn makes up for: more than one bad turn in three ejects too."""
_PROBES = 3
_EMPTY_ANSWERS = 4
_EJECTIONS = metrics.counter(
    "rollout_gateway", "ejections_total", "Rollout servers taken out of the choice."
)
_EJECTED = metrics.gauge(
    "rollout_gateway", "ejected_servers", "Rollout servers that are ejected or probed."
)
_FAILURES = metrics.counter(
    "rollout_gateway", "server_failures_total", "Turns that a rollout server has failed."
)


class OutlierEjection:
    """Counts good and failed turns of servers, and says which may be given turns."""

    def __init__(
        self,
        servers: Callable[[], Collection[Server]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`servers` are all that the gateway knows."""
        self._servers = servers
        self._clock = clock

    def state(self, server: Server) -> pb.Ejection.ValueType:
        until = server.standing.ejected_until
        if until is None:
            return pb.EJECTION_NONE
        return pb.EJECTION_EJECTED if self._clock() < until else pb.EJECTION_PROBED

    def seconds_left(self, server: Server) -> float:
        return max((server.standing.ejected_until or 0.0) - self._clock(), 0.0)

    def failed(self, server: Server, cause: str) -> None:
        """A turn failed there, for which the turn is not to blame."""
        _FAILURES.inc()
        state, standing = self.state(server), server.standing
        if state == pb.EJECTION_EJECTED:
            return  # of a turn that was there before
        standing.cause = cause
        standing.failures += 1
        has_failed = self.enabled and standing.failures >= limits.EJECTION_FAILURES
        if state == pb.EJECTION_PROBED or has_failed:
            self._eject(server, cause)

    def answered(self, server: Server, *, is_empty: bool) -> None:
        """A turn ended there as it should; `is_empty`: without an answer."""
        standing = server.standing
        standing.num_answers += 1
        standing.num_not_empty += not is_empty
        standing.num_empty = standing.num_empty + 1 if is_empty else 0
        if is_empty and self._is_alone_in_silence(server):
            self._eject(server, f"{standing.num_empty} empty answer(s) that others do not give")
            return
        standing.failures = max(standing.failures - _FORGIVEN, 0.0)
        if self.state(server) == pb.EJECTION_PROBED:
            standing.num_probes += 1
            if standing.num_probes >= _PROBES:
                self._restore(server)

    def doubts_empty(self, server: Server) -> bool:
        """Whether another server should confirm that an answer is empty.

        One that has never given another answer may be broken. Where all have been asked, and none
        has, they agree: it is the model.
        """
        if not self.enabled or server.standing.num_not_empty:
            return False
        others = [s for s in self._servers() if s is not server and s.info is not None]
        in_use = [s.standing for s in others if self.state(s) == pb.EJECTION_NONE]
        return any(other.num_not_empty or not other.num_answers for other in in_use)

    def use(self, server: Server) -> pb.ServerUse:
        """The contract's form of what is known of it."""
        standing, state = server.standing, self.state(server)
        is_in_use = state == pb.EJECTION_NONE
        return pb.ServerUse(
            address=server.address,
            server_id=server.info.server_id if server.info is not None else "",
            answers=server.info is not None,
            num_turns=server.num_turns,
            ejection=state,
            ejection_left=to_duration(self.seconds_left(server)),
            ejection_cause="" if is_in_use else standing.cause,
        )

    @property
    def enabled(self) -> bool:
        return limits.EJECTION_FAILURES > 0

    def _is_alone_in_silence(self, server: Server) -> bool:
        """Whether it gives empty answers in a row that the others do not give."""
        is_probed = self.state(server) == pb.EJECTION_PROBED
        if not self.enabled or (server.standing.num_empty < _EMPTY_ANSWERS and not is_probed):
            return False
        others = [s.standing for s in self._servers() if s is not server and s.standing.num_answers]
        return bool(others) and all(2 * o.num_empty < server.standing.num_empty for o in others)

    def _eject(self, server: Server, cause: str) -> None:
        standing, now = server.standing, self._clock()
        standing.failures, standing.num_probes = 0.0, 0
        standing.num_empty, standing.num_not_empty = 0, 0
        if standing.ejected_until is None and not self._may_eject_one_more():
            _log.warning("server_not_ejected", server=server.address, cause=cause)
            return
        longest = limits.MAX_EJECTION_SECONDS
        if standing.ejected_until is None and now - standing.restored > longest:
            standing.num_ejections = 0
        seconds = min(limits.EJECTION_SECONDS * 2.0**standing.num_ejections, longest)
        standing.num_ejections += 1
        standing.cause = cause
        standing.ejected_until = now + seconds
        _EJECTIONS.inc()
        self.count()
        _log.warning("server_ejected", server=server.address, cause=cause, seconds=seconds)

    def _may_eject_one_more(self) -> bool:
        servers = self._servers()
        number = 1 + sum(server.standing.ejected_until is not None for server in servers)
        return number <= limits.MAX_EJECTED_SHARE * len(servers)

    def _restore(self, server: Server) -> None:
        server.standing.ejected_until = None
        server.standing.restored = self._clock()
        self.count()
        _log.info("server_restored", server=server.address)

    def count(self) -> None:
        """Set the metric, also after a server has left."""
        _EJECTED.set(sum(s.standing.ejected_until is not None for s in self._servers()))
