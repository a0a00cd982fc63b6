"""Every Redis key, in one place.

All keys of a rollout share a cluster slot, and so do all keys of a run.
Names are validated before they get here: a run_id holds no colon, nothing holds a brace.
"""

from __future__ import annotations

from functools import lru_cache

RUNS = "sf:runs"
"""Set of all run_ids."""

STORE = "sf:{store}"
"""String: marks the store, to notice one that has come back empty."""

RUN_PARTS = (
    "config",  # string: the rules as JSON; the run exists if this does
    "counters",  # hash: epoch, steps, totals, change numbers of long polls, times of the run; below
    "tasks",  # hash: task_id -> task as JSON; never deleted, so that a task never runs twice
    "queue:1",  # list: TRAIN tasks to admit, "task_id", or "task_id attempt..." when requeued
    "queue:2",  # list: EVAL tasks
    "open_slots:1",  # list: "task_id/slot" of TRAIN groups, to lease
    "open_slots:2",  # list: the same of EVAL groups
    "groups",  # hash: task_id -> group as JSON, from admission to commit
    "leases",  # sorted set: rollout_id by expiry in ms; 0: its group does not need it any more
    "nonces",  # hash: rollout_id -> nonce of its lease, and back: nonce -> rollout_id
    "outbox",  # sorted set: rollout_id by time of its outbox mark in ms
    "rollouts",  # sorted set: rollout_id by order of registration
    "ready",  # list: complete groups, oldest first
    "ledger",  # hash: step -> entry as JSON, from lease to commit
    "commits",  # hash: step -> number of samples
    "trainers",  # hash: trainer_id -> epoch
    "dead_letters",  # list: dead letters as JSON, oldest first
    "admission_order",  # sorted set: TRAIN groups from admission to lease, by order of admission
    "cells",  # hash of groups that wait for columns: cell -> state, task_id -> cells it lacks
    "cell_queue",  # sorted set: "column number sample_id" of queued cells, in that order
    "cell_leases",  # sorted set: leased cells ("column sample_id"), by expiry in ms
    "ended_groups",  # sorted set: '["task_id", attempts of each slot...]' by committed step
    "committed_steps",  # hash: task_id -> its step, "task_id attempts" -> those trained or 0
    "replay",  # hash: task_id -> "step mean_reward {group}" of a group kept for replay
    "column_requests",  # sorted set: "nonce epoch" of leases of columns, by expiry in ms
    "trained_steps",  # hash: step that is recorded -> epoch of the trainer that did it
    "rows",  # hash: rollout_id -> row of the index, see inspection_store.py
)
"""The KEYS of every run script, in this order.

Among the counters, "created" and "ended" are Unix seconds; a run without "ended" runs. "deleting"
is there once the run is being deleted; then it has no config any more. "rows_floor" is the number
of the newest rollout that is too old for a row of the index.

JSON that is made from a dataclass lacks fields at their default: see `record_json.py`.

A group is {"purpose": "1" | "2", "admission": its number in `admission_order`, "own": true for an
agent's own task, "replaced", "done": counts of samples, "min_version": oldest version of its
samples once it is complete, "slots": [...]}. A slot is {"attempt": the newest, "state": "open" |
"leased" | "done" | "surplus"} and, once done, {"reward": text, "min_version": int, "samples":
[sample_id...], "rewards": {name: number as text}} with the sums of the rewards of the rollout and
its turns. Only slots that are done count; a surplus one was not needed. Numbers that are not
integers are texts: Lua writes 14 digits.

A cell is one column of one sample, "column sample_id". Its state is "number" when queued,
"number epoch" when leased, "=epoch" when written. "tries column sample_id" counts how often a
consumer failed on it, "failure column" says why the newest did since the column was last written.

A ledger entry is {"groups": [task_id...], "samples": [fresh sample_id...], "replayed": [...],
"base": weight version, "deliveries": number, "epoch": the newest trainer it was delivered to,
"open": true while it may grow}.

A dead letter is {"task_id", "reason": DeadLetterReason as int, "message", "time": Unix seconds,
"attempts": [the newest attempt of each slot, over all groups of the task...]}: its rollouts are
task_id/slot/1 to task_id/slot/attempt, which retention deletes as if the group had been committed
when it became a dead letter. The newest MAX_DEAD_LETTERS are kept.
"""

ROLLOUT_PARTS = (
    "header",  # hash: the rollout and its turns, see below; the rollout exists if this does
    "chunks:",  # prefix; with a turn_id, list: chunks of the turn, see append_tokens.lua
)
"""The KEYS of every rollout script, in this order.

A header has identity, credential, traceparent, required_version, state, outcome, created, finished,
labels; server and incarnation of the store at the newest BeginTurns; num_turns and newest_turn;
recorded, the digest of a rollout that was generated elsewhere. Each turn has "turn:turn_id" ->
"number prompt_digest begin", the begin as JSON, and "state:turn_id" -> "num_tokens incarnation
counter attempt spans", followed by " reason key" or " reason key drift" once the turn has ended.
Spans are "start:kind" with commas between, or "-"; a kind is
"origin:weight_version:version_source:server_id".
"""


@lru_cache(maxsize=256)
def run_keys(run_id: str) -> tuple[str, ...]:
    return tuple(f"sf:{{{run_id}}}:{part}" for part in RUN_PARTS)


@lru_cache(maxsize=1 << 14)
def rollout_keys(run_id: str, rollout_id: str) -> tuple[str, str]:
    """Header of a rollout, and prefix of the keys of its turns' chunks."""
    header, chunks = ROLLOUT_PARTS
    return f"sf:{{{run_id}:{rollout_id}}}:{header}", f"sf:{{{run_id}:{rollout_id}}}:{chunks}"


def column_keys(run_id: str, rollout_id: str) -> tuple[str, str]:
    """Header of a rollout, and hash: "column sample_id" -> epoch:float32 values."""
    return rollout_keys(run_id, rollout_id)[0], f"sf:{{{run_id}:{rollout_id}}}:columns"


def routed_key(run_id: str, rollout_id: str) -> str:
    """Hash: "start turn_id" of routed experts -> "num_tokens num_layers num_chosen ids"."""
    return f"sf:{{{run_id}:{rollout_id}}}:routed_experts"


def trained_steps(run_id: str) -> str:
    """Hash of the run: the steps of which something is recorded."""
    return run_keys(run_id)[RUN_PARTS.index("trained_steps")]


def trained_keys(run_id: str, step: int) -> tuple[str, str]:
    """Of a step two hashes: sample_id -> summary of what was trained, and values of its tokens."""
    return f"sf:{{{run_id}}}:trained_samples:{step}", f"sf:{{{run_id}}}:trained_tokens:{step}"


def deleted_keys(run_id: str, rollout_id: str) -> tuple[str, ...]:
    """All that is stored with a rollout; its chunks by their prefix."""
    columns = column_keys(run_id, rollout_id)[1]
    return (*rollout_keys(run_id, rollout_id), columns, routed_key(run_id, rollout_id))


def all_of_run(run_id: str) -> str:
    """Pattern of the keys of a run and of its rollouts; a run_id has no special character."""
    return f"sf:{{{run_id}[:}}]*"


def is_header(key: str) -> bool:
    """Whether the key is the header of a rollout."""
    return key.endswith("}:header")
