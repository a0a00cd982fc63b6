"""Metrics of the trajectory manager, beside the rate, errors and duration of each rpc."""

from __future__ import annotations

from services.chassis.metrics import counter, gauge, histogram
from trajectory_manager.model.records import DeadLetterReason

_SERVICE = "trajectory_manager"
_STALENESS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


APPENDED = counter(_SERVICE, "appended_tokens_total", "Tokens recorded.")
DUPLICATE = counter(_SERVICE, "duplicate_tokens_total", "Tokens sent again and found stored.")
FAILED_APPENDS = counter(
    _SERVICE, "failed_appends_total", "Appends that failed, by reason.", ("reason",)
)
LEASES = counter(_SERVICE, "task_leases_total", "Task leases by transition.", ("transition",))
SETTLED = counter(_SERVICE, "settled_rollouts_total", "Effects of finished rollouts.", ("effect",))
DISCARDED = counter(_SERVICE, "discarded_groups_total", "Groups discarded, by reason.", ("reason",))
for _reason in (*(each.name.lower() for each in DeadLetterReason), "staleness"):
    DISCARDED.labels(_reason)  # 0 until then: Prometheus sees no increase in a first value
STALENESS = histogram(
    _SERVICE,
    "sample_staleness_versions",
    "Staleness of leased samples, in weight versions.",
    buckets=_STALENESS,
)
REQUEUED = counter(
    _SERVICE, "requeued_tasks_total", "Tasks of dead letters that were queued again."
)
STORED = gauge(_SERVICE, "stored_tokens", "Tokens stored.")
DEPTH = gauge(_SERVICE, "queue_depth", "Groups or tasks by stage.", ("stage",))
STAGES = (
    *("ready_groups", "running_groups", "queued_tasks", "running_rollouts", "incomplete_groups"),
    *("replay_groups", "dead_letters"),
)
"""Of DEPTH; the counts of a run have them as `num_...`."""
