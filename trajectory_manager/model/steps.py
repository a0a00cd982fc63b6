"""Steps of the trainer as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """The result of Reconcile."""

    epoch: int
    """Fencing number of this trainer."""
    pending_steps: tuple[int, ...]
    """Steps that will be leased again unchanged."""
    open_step: int = 0
    """The last of these if it may still grow; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLease:
    """A ledger entry: which samples a step trains on."""

    step: int
    base_weight_version: int
    """Version staleness is counted from; fixed when the step was first leased."""
    sample_ids: tuple[str, ...]
    """Fresh samples in order, members of a group adjacent; never part of another step."""
    replayed_ids: tuple[str, ...] = ()
    """Samples of earlier groups that are trained again, in order, after the fresh ones."""
    num_deliveries: int = 1
    """Trainers it was delivered to."""
    is_open: bool = False
    """Whether it may still grow."""
    streamed: bool = False
    """Whether it took its last groups as they became ready: a repeated step is cut as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAttempt:
    """The result of leasing a step."""

    lease: StepLease | None
    """None: not enough fresh groups yet."""
    num_too_old: int = 0
    """Groups that this call discarded or withheld as too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishWait:
    """What a publish under WAIT waits for."""

    seconds: float
    """How much longer it waits at most, by the store's clock; 0: publish now."""
    num_blocking_groups: int = 0
    """Groups with a finished sample that would be too old."""
    running: tuple[str, ...] = ()
    """Rollouts under way of the other groups that are not leased to a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The result of rejecting groups of a step."""

    num_rejected: int
    """Groups that left it."""
    is_open: bool
    """Whether it takes others now."""
