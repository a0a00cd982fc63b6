"""What servers have said against one turn: is the turn to blame, or the servers?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.gateway.dispatch.outlier_ejection import OutlierEjection
    from rollout.gateway.dispatch.server_state import Server

_REPEATED = 3
"""Verdicts of one server that count where no other serves."""


class TurnFailures:
    """A turn that another server answers was not to blame: those that failed it are.

    So no agent can have servers ejected by turns that no server can answer.
    """

    def __init__(self, outliers: OutlierEjection) -> None:
        self._outliers = outliers
        self._accusers: list[tuple[Server, str]] = []
        self._verdicts: Counter[str] = Counter()
        self.avoided: frozenset[str] = frozenset()
        """Addresses of the servers that have failed it."""

    def add(self, server: Server, cause: str) -> None:
        """It failed there, maybe by no fault of its own."""
        self._accusers.append((server, cause))
        self.avoided |= {server.address}

    def add_verdict(self, server: Server, cause: str) -> bool:
        """It was refused there, or answered impossibly; True: several servers agree.

        Or the same one has said so three times, which it gets only if no other serves. Without
        ejection the word of one server is final.
        """
        self.add(server, cause)
        self._verdicts[server.address] += 1
        most = _REPEATED if self._outliers.enabled else 1
        return len(self._verdicts) > 1 or self._verdicts[server.address] >= most

    def answered(self) -> None:
        """It was answered: what was said before counts against who said it."""
        for server, cause in self._accusers:
            self._outliers.failed(server, cause)
        self._accusers.clear()
        self._verdicts.clear()
