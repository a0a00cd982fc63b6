"""Every Redis key, in one place.

All keys of a rollout share a cluster slot, and so do all keys of a run.
Names are validated before they get here: a run_id holds no colon, nothing holds a brace.
"""

from __future__ import annotations

from functools import lru_cache

RUNS = "sf:runs"
"""Set of all run_ids."""

RUN_PARTS = (
    "config",  # string: the rules as JSON; its existence is the run's
    "counters",  # hash: epoch, steps, totals, groups of the open step, change numbers of long-polls
    "tasks",  # hash: task_id -> task as JSON, for ever: a task never runs twice
    "queue:1",  # list: TRAIN tasks waiting to be admitted, "task_id", or "task_id attempt..." again
    "queue:2",  # list: EVAL tasks
    "open:1",  # list: "task_id/slot" of TRAIN samples nobody works on
    "open:2",  # list: the same of EVAL
    "groups",  # hash: task_id -> group as JSON, from admission to commit
    "leases",  # sorted set: rollout_id by expiry, in ms; 0: its group needs it no more
    "nonces",  # hash: rollout_id -> proof of its lease
    "marks",  # sorted set: outbox, rollout_id by time
    "listed",  # sorted set: rollout_id by order
    "ready",  # list: complete groups, oldest first
    "ledger",  # hash: step -> entry as JSON, from lease to commit
    "commits",  # hash: step -> number of samples
    "trainers",  # hash: trainer_id -> epoch
    "dead",  # list: dead letters as JSON, oldest first
    "order",  # sorted set: TRAIN groups from admission to lease, by order of admission
    "columns",  # hash of groups that wait for columns: cell -> state, task_id -> cells it lacks
    "column_queue",  # sorted set: "column number sample_id" of cells that wait, in that order
    "column_leases",  # sorted set: cells ("column sample_id") that are computed, by expiry in ms
    "trained",  # sorted set: '["task_id", attempts of each slot...]' by committed step, dead too
    "steps",  # hash: task_id -> step that committed it, "task_id attempts" -> those trained or 0
    "replay",  # hash: task_id -> "step mean_reward {group}" of one kept for replay; mean "-": none
)
"""The KEYS of every run script, in this order.

A group is {"purpose": "1" | "2", "admission": its number in `order`, "replaced", "done": counts of
samples, "min_version": oldest version of its samples once it is complete, "slots": [...]}.
A slot is {"attempt": the newest, "state": "open" | "leased" | "done" | "surplus"} and, once done,
{"reward": text, "min_version": int, "samples": [sample_id...], "tokens": [of each sample...],
"rewards": {name: number as text}} with the rewards of the whole rollout. Only slots that are done
count; a surplus one was not needed. Numbers that are not integers are texts: Lua writes 14 digits.

A ledger entry is {"groups": [task_id...], "samples": [fresh sample_id...], "replayed": [...],
"tokens": [of each of both], "base": weight version, "shards", "deliveries": numbers, "epoch": the
newest trainer it was delivered to, "open": true while it may grow}.

A dead letter is {"task_id", "reason": DeadLetterReason as int, "message", "time": unix seconds,
"attempts": [the newest attempt of each slot, over all lives of the task...]}: its rollouts are
task_id/slot/1 to task_id/slot/attempt, which retention deletes as if the group had been committed
when it died. The newest MAX_DEAD_LETTERS are kept.
"""

ROLLOUT_PARTS = (
    "header",  # hash: the rollout and its turns, see below; its existence is the rollout's
    "segments:",  # prefix; with a turn_id, list: segments of the turn, see append.lua
)
"""The KEYS of every rollout script, in this order.

A header has identity, credential, traceparent, state, outcome, created, finished; server
and incarnation of the store when a turn was opened last; num_turns and newest_turn; recorded, the
digest of one that was generated elsewhere. Each turn has "turn:turn_id" -> "number prompt_digest
opening", the opening as JSON, and "live:turn_id" -> "num_tokens incarnation counter attempt spans",
followed by " reason key" or " reason key drift" once the turn has ended. Spans are "start:kind"
with commas between, or "-"; a kind is "origin:weight_version:version_source:server_id".
"""


@lru_cache(maxsize=256)
def run_keys(run_id: str) -> tuple[str, ...]:
    """All keys of a run."""
    return tuple(f"sf:{{{run_id}}}:{part}" for part in RUN_PARTS)


@lru_cache(maxsize=1 << 14)
def rollout_keys(run_id: str, rollout_id: str) -> tuple[str, str]:
    """Header of a rollout, and prefix of its segments; the key of a turn's ends in its turn_id."""
    header, segments = ROLLOUT_PARTS
    return f"sf:{{{run_id}:{rollout_id}}}:{header}", f"sf:{{{run_id}:{rollout_id}}}:{segments}"


def column_keys(run_id: str, rollout_id: str) -> tuple[str, str]:
    """Header of a rollout, and hash: "column sample_id" -> epoch:float32 values."""
    return rollout_keys(run_id, rollout_id)[0], f"sf:{{{run_id}:{rollout_id}}}:columns"


def deleted_keys(run_id: str, rollout_id: str) -> tuple[str, ...]:
    """All that is stored with a rollout; its segments by their prefix."""
    return (*rollout_keys(run_id, rollout_id), column_keys(run_id, rollout_id)[1])
