"""Interface of the weights store: versions, their states, and the fence of the trainer.

A version goes `ALLOCATED -> COMMITTED -> FORGOTTEN`: `begin` allocates, `commit` makes it visible,
`forget` deletes it after enough newer commits. A version that is never committed remains a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from seamflow.weights.v1.weight_service_pb2 import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A model of a run; each has its own sequence of versions."""

    run_id: str
    """Training job."""
    model: str
    """Name of the model within the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """A request to publish a version."""

    key: str
    """Idempotency key (`request_id`): the same one gets the same version."""
    step: int
    """Optimizer step that made the weights."""
    parent: int
    """Version they were trained from."""
    epoch: int
    """Fencing number of the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """An allocated version."""

    step: int
    """Optimizer step that made the weights."""
    parent: int
    """Version they were trained from."""


class Store(Protocol):
    """Every method is atomic and raises UNAVAILABLE while the store is unavailable."""

    async def begin(self, scope: Scope, publish: Publish, floor: int) -> int:
        """Allocate a version above `floor` and above every earlier one; same key, same version.

        Raises:
            ServiceError: ABORTED (stale epoch), ALREADY_EXISTS (the key is in use with another step
                or parent).
        """

    async def allocation(self, scope: Scope, version: int) -> Allocation | None:
        """The allocation of `version`; None: it was never allocated, or it is forgotten."""

    async def fence(self, scope: Scope, epoch: int, version: int) -> None:
        """Check that `epoch` is not stale and `version` is allocated.

        Raises:
            ServiceError: ABORTED (stale epoch), NOT_FOUND (never allocated, or forgotten).
        """

    async def commit(self, scope: Scope, epoch: int, manifest: Manifest) -> Manifest:
        """Commit the manifest; returns the committed one, which may be an earlier one.

        Raises:
            ServiceError: ABORTED (stale epoch), NOT_FOUND (never allocated).
        """

    async def manifest(self, scope: Scope, version: int) -> Manifest | None:
        """The manifest of a committed version."""

    async def newest(self, scope: Scope) -> int:
        """The newest committed version; 0 for none."""

    async def forget(self, scope: Scope, keep: int) -> int:
        """Delete all below the newest `keep` committed versions; returns the oldest one kept."""

    async def join(self, scope: Scope, group: str, member: str, *, ttl: float) -> None:
        """Add `member` to `group` for `ttl` seconds; a repeated call extends the membership."""

    async def members(self, scope: Scope, group: str) -> list[str]:
        """Current members of `group`, sorted."""

    async def leave(self, scope: Scope, group: str, member: str) -> None:
        """Remove a member. Idempotent."""

    async def reachable(self) -> bool:
        """Whether the store answers now."""

    async def close(self) -> None:
        """Close all connections."""
