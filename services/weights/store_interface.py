"""What the weights process remembers: versions, their state, and the fence that protects them.

A version goes `ALLOCATED -> COMMITTED -> FORGOTTEN`: `begin` allocates, `commit` makes it visible,
`forget` drops it once enough newer ones are committed. One that is never committed stays a hole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from seamflow.weights.v1.weight_service_pb2 import Manifest

__all__ = ["Allocation", "Publish", "Scope", "Store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Whose versions are counted: each model of each run has its own numbers."""

    run_id: str
    """Training job."""
    model: str
    """Name of the model within the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """A trainer's wish to publish."""

    key: str
    """Idempotency key: the same one gets the same version."""
    step: int
    """Optimizer step that made the weights."""
    parent: int
    """Version they were trained from."""
    epoch: int
    """Fencing number of the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What is known of a version before it is committed."""

    step: int
    """Optimizer step that made the weights."""
    parent: int
    """Version they were trained from."""


class Store(Protocol):
    """One atomic step per method. Every method raises UNAVAILABLE while the store is away."""

    async def begin(self, scope: Scope, publish: Publish, floor: int) -> int:
        """Allocate a version above `floor` and above every earlier one; same key, same version.

        Raises:
            ServiceError: ABORTED (a newer trainer was seen), ALREADY_EXISTS (the key came
                before with another step or parent).
        """

    async def allocation(self, scope: Scope, version: int) -> Allocation | None:
        """The allocation of `version`; None: it was never allocated, or it is forgotten."""

    async def commit(self, scope: Scope, epoch: int, manifest: Manifest) -> Manifest:
        """Make the manifest visible; returns the one that stands, which may be an earlier one.

        Raises:
            ServiceError: ABORTED (a newer trainer was seen), NOT_FOUND (never allocated).
        """

    async def manifest(self, scope: Scope, version: int) -> Manifest | None:
        """The manifest of a committed version."""

    async def newest(self, scope: Scope) -> int:
        """The newest committed version; 0: none."""

    async def forget(self, scope: Scope, keep: int) -> int:
        """Drop all below the newest `keep` committed versions; returns the oldest one kept."""

    async def enrol(self, scope: Scope, group: str, member: str, *, ttl: float, limit: int) -> bool:
        """Make `member` one of at most `limit` of `group` (0: any number) for `ttl` seconds.

        A member that enrols again stays, with all of its time. Returns whether it is one now.
        """

    async def members(self, scope: Scope, group: str) -> list[str]:
        """Who is enrolled now, sorted."""

    async def leave(self, scope: Scope, group: str, member: str) -> None:
        """Strike a member off; one that is not there is fine."""

    async def reachable(self) -> bool:
        """Whether the store answers now."""

    async def close(self) -> None:
        """Let go of connections."""
