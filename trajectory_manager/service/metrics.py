"""Metrics of the trajectory manager."""

from __future__ import annotations

from services.chassis.metrics import counter, gauge, histogram
from trajectory_manager.model.records import Effect, SettleResult
from trajectory_manager.model.runs import RunCounts

_SERVICE = "trajectory_manager"
_STALENESS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


class Metrics:
    """Metrics in addition to the rate, errors and duration of each rpc."""

    def __init__(self) -> None:
        self._appended = counter(_SERVICE, "appended_tokens_total", "Tokens recorded.")
        self._duplicate = counter(
            _SERVICE, "duplicate_tokens_total", "Tokens sent again and found stored."
        )
        self._failed = counter(
            _SERVICE, "failed_appends_total", "Appends that failed, by reason.", ("reason",)
        )
        self._leases = counter(
            _SERVICE, "task_leases_total", "Task leases by transition.", ("transition",)
        )
        self._settled = counter(
            _SERVICE, "settled_rollouts_total", "Effects of finished rollouts.", ("effect",)
        )
        self._discarded = counter(
            _SERVICE, "discarded_groups_total", "Groups discarded, by reason.", ("reason",)
        )
        self._staleness = histogram(
            _SERVICE,
            "sample_staleness_versions",
            "Staleness of leased samples, in weight versions.",
            buckets=_STALENESS,
        )
        self._depth = gauge(_SERVICE, "queue_depth", "Groups or tasks by stage.", ("stage",))
        self._stored = gauge(_SERVICE, "stored_tokens", "Tokens stored.")
        self._requeued = counter(
            _SERVICE, "requeued_tasks_total", "Tasks of dead letters that were queued again."
        )

    def appended(self, num_new: int, num_duplicate: int) -> None:
        """An append was acknowledged."""
        self._appended.inc(num_new)
        self._duplicate.inc(num_duplicate)

    def append_failed(self, reason: str) -> None:
        """An append failed."""
        self._failed.labels(str(reason)).inc()

    def leases(self, transition: str, number: int = 1) -> None:
        """Task leases were leased, extended, lost, expired or surplus."""
        self._leases.labels(transition).inc(number)

    def settled(self, settled: SettleResult) -> None:
        """A finished rollout was settled."""
        self._settled.labels(settled.effect.value).inc()
        if settled.effect is Effect.DISCARDED:
            self.discarded(settled.reason)

    def discarded(self, reason: str, number: int = 1) -> None:
        """Groups were discarded without being trained."""
        self._discarded.labels(reason).inc(number)

    def requeued(self, number: int) -> None:
        """Tasks of dead letters were queued again."""
        self._requeued.inc(number)

    def staleness(self, versions: int) -> None:
        """A sample was leased this many versions behind its step."""
        self._staleness.observe(versions)

    def depth(self, totals: RunCounts) -> None:
        """Queue depths by stage, over all runs."""
        self._depth.labels("ready_groups").set(totals.num_ready_groups)
        self._depth.labels("running_groups").set(totals.num_running_groups)
        self._depth.labels("queued_tasks").set(totals.num_queued_tasks)
        self._depth.labels("running_rollouts").set(totals.num_running_rollouts)
        self._depth.labels("incomplete_groups").set(totals.num_incomplete_groups)
        self._depth.labels("replay_groups").set(totals.num_replay_groups)
        self._depth.labels("dead_letters").set(totals.num_dead_letters)
        self._stored.set(totals.num_stored_tokens)
