"""Every Redis key, in one place.

All keys of a rollout share a cluster slot, and so do all keys of a run.
Names are validated before they get here: a run_id holds no colon, nothing holds a brace.
"""

from __future__ import annotations

RUNS = "sf:runs"
"""Set of all run_ids."""

RUN_PARTS = (
    "config",  # string: the rules as JSON; its existence is the run's
    "counters",  # hash: epoch, steps, totals, and the change numbers of long-polls
    "tasks",  # hash: task_id -> task as JSON, for ever: a task never runs twice
    "queue:1",  # list: TRAIN tasks waiting to be admitted
    "queue:2",  # list: EVAL tasks
    "open:1",  # list: "task_id/slot" of TRAIN samples nobody works on
    "open:2",  # list: the same of EVAL
    "groups",  # hash: task_id -> group as JSON, from admission to commit
    "leases",  # sorted set: rollout_id by expiry, in ms
    "nonces",  # hash: rollout_id -> proof of its lease
    "marks",  # sorted set: outbox, rollout_id by time
    "listed",  # sorted set: rollout_id by order
    "ready",  # list: complete groups, oldest first
    "ledger",  # hash: step -> groups, samples and base version as JSON
    "commits",  # hash: step -> number of samples
    "trainers",  # hash: trainer_id -> epoch
)
"""The KEYS of every run script, in this order."""

ROLLOUT_PARTS = (
    "header",  # hash: identity, credential, state, outcome, times
    "order",  # list: turn_id in the order they began
    "turns",  # hash: turn_id -> opening as JSON
    "writers",  # hash: turn_id -> incarnation:counter:server:attempt
    "ends",  # hash: turn_id -> finish reason and answer key
)
"""The KEYS of every rollout script, in this order; those of one turn follow."""

TURN_PARTS = (
    "ids",  # string: int32 ids, grown by APPEND
    "logprobs",  # string: float32 log-probs, grown by APPEND
    "spans",  # list: "num_tokens origin version source server"
)
"""What a turn added."""


def run_keys(run_id: str) -> list[str]:
    """All keys of a run."""
    return [f"sf:{{{run_id}}}:{part}" for part in RUN_PARTS]


def rollout_keys(run_id: str, rollout_id: str) -> list[str]:
    """All keys of a rollout that do not belong to one turn."""
    return [f"sf:{{{run_id}:{rollout_id}}}:{part}" for part in ROLLOUT_PARTS]


def turn_keys(run_id: str, rollout_id: str, turn_id: str) -> list[str]:
    """The keys of what a turn added."""
    return [f"sf:{{{run_id}:{rollout_id}}}:{part}:{turn_id}" for part in TURN_PARTS]
