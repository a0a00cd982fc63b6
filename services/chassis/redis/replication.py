"""Replicated durability: how a connection checks that replicas have its writes.

Redis answers before its replicas have a write, and a failover then loses it. WAIT on the
connection that wrote returns how many replicas have it. It counts from the last *write* of that
connection only: a retry over another connection that finds its effect done already writes
nothing and would be confirmed immediately, though no replica may have it yet. So a marker is
written before each WAIT, after everything that the server had executed until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import exceptions

_WAIT_MS = 500
_MARKER_MS = 1000


class NotReplicated(exceptions.ConnectionError):
    """Executed, but not confirmed by a replica in time: the caller retries."""


class Confirmation:
    """The commands appended to a batch, and the check of their replies."""

    def __init__(self, replicas: int) -> None:
        """`replicas` must have each write before it is acknowledged; 0: no check."""
        self._replicas = replicas

    def commands(self, first: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The commands to send after a batch that begins with `first`, on the same connection."""
        if self._replicas == 0:
            return []
        marker = _marker(first[3] if first[0] in ("EVAL", "EVALSHA") else first[1])
        return [("SET", marker, "", "PX", _MARKER_MS), ("WAIT", self._replicas, _WAIT_MS)]

    def confirmed(self, replies: list[Any], num_commands: int) -> list[Any]:
        """The first `num_commands` of `replies`; `NotReplicated` where the rest does not confirm.

        Errors are unchanged: a failed command needs no replica.
        """
        if len(replies) == num_commands or self._holds(*replies[num_commands:]):
            return replies[:num_commands]
        doubt = NotReplicated(f"no {self._replicas} replica(s) confirmed within {_WAIT_MS} ms")
        return [
            reply if isinstance(reply, Exception) else doubt for reply in replies[:num_commands]
        ]

    def _holds(self, marked: Any, waited: Any) -> bool:
        failed = isinstance(marked, Exception) or isinstance(waited, Exception)
        return not failed and waited >= self._replicas


def _marker(key: str | bytes) -> str:
    """A key in the slot of `key`, under the same prefix."""
    name = key.decode() if isinstance(key, bytes) else key
    prefix = name.partition(":")[0]
    tag = name[name.find("{") + 1 : name.find("}")] if "{" in name else name
    return f"{prefix}:{{{tag}}}:confirmed"
