"""Why rollouts fail: a finding of why-stuck for each cause."""

from __future__ import annotations

from collections.abc import Iterator

from seamflow.cli.diagnosis import Finding
from seamflow.cli.snapshot import Snapshot
from seamflow.failure_causes import causes

_MAX_CAUSES = 3


def failed_rollouts(snapshot: Snapshot) -> Iterator[Finding]:
    """The most frequent causes; `normal` while more rollouts finish than fail."""
    normal = snapshot.num_finished > len(snapshot.failed_rollouts)
    for cause in causes(snapshot.failed_rollouts)[:_MAX_CAUSES]:
        plural = "s" if cause.number > 1 else ""
        yield Finding(
            rule="rollouts_fail",
            sentence=f"{cause.number} rollout{plural} failed and "
            f"{'were' if plural else 'was'} not scored, {snapshot.num_finished} finished; last "
            f"{cause.line}.",
            cure=f"{cause.cure} `seamflow tail {cause.rollout_id}` shows what led to it.",
            normal=normal,
        )
