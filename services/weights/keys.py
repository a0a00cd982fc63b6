"""Redis keys of the weights service, and the records behind them.

The run is the hash tag of each key, so a script touches one slot.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A model of a run; each has its own sequence of versions."""

    run_id: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """A request to publish a version."""

    key: str
    """Idempotency key (`request_id`): the same one gets the same version."""
    step: int
    """Optimizer step that made the weights."""
    parent: int
    epoch: int
    """Fencing number of the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """An allocated version."""

    step: int
    parent: int


STORE = "sf:weights:store"
"""String: marks the store, to notice one that has come back empty."""


def counters(scope: Scope) -> str:
    """Hash: `allocated` (last allocated version), `epoch` (fence), `newest` (committed)."""
    return _key(scope, "counters")


def publishes(scope: Scope) -> str:
    """Hash: idempotency key -> version."""
    return _key(scope, "publishes")


def allocations(scope: Scope) -> str:
    """Hash: version -> "step:parent"."""
    return _key(scope, "allocations")


def manifests(scope: Scope) -> str:
    """Hash: version -> serialized Manifest."""
    return _key(scope, "manifests")


def members(scope: Scope, group: str) -> str:
    """Sorted set: member of `group` -> expiry, in milliseconds of Redis's clock."""
    return _key(scope, f"members:{group}")


def _key(scope: Scope, part: str) -> str:
    return f"sf:weights:{{{scope.run_id}}}:{scope.model}:{part}"
