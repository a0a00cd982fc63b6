"""Redis against its model over random histories, and what the machine finds when it should."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from services.chassis.errors import Reason
from tests.lib.trajectory_manager.support import RULES, Run, refused, token_append
from tests.suites.state_machine.base import RUN_ID
from tests.suites.state_machine.machine import (
    Machine,
    Rewriters,
    Trainers,
    Writers,
    explore,
    rig,
)
from trajectory_manager.model.records import Purpose, RolloutResult, RolloutState, Task, Topic
from trajectory_manager.model.tokens import Cut
from trajectory_manager.store.redis.column_store import CellFailure
from trajectory_manager.store.redis.connect import Store
from trajectory_manager.store.redis.retention_store import EndedGroup

# The last of each is a seed that finds it after few histories; another one may need hundreds.
BROKEN = {
    "settle counts attempts that were replaced": (
        Trainers,
        "settle_rollouts",
        "if not slot or slot.state ~= 'leased' or slot.attempt ~= tonumber(attempt) then",
        "if not slot then",
        1,
    ),
    "append takes other tokens for a repetition": (
        Rewriters,
        "append_tokens",
        "if old_ids ~= string.sub(ids, 1, overlap * 4) or old_logprobs ~= "
        "string.sub(logprobs, 1, overlap * 4) then",
        "if false then",
        2,
    ),
    "append lets a replaced writer write": (
        Rewriters,
        "append_tokens",
        "if inc ~= incarnation or count ~= counter or not fresh then",
        "if false then",
        0,
    ),
}


SLOW = {"append lets a replaced writer write", "append takes other tokens for a repetition"}
"""Found after many histories."""
LONG = pytest.mark.long(
    short="tests/integration/trajectory_manager/state_machine/test_state_machine.py"
)


def test_both_stores_agree(tmp_path: Path) -> None:
    """Whatever agents, gateways, trainers and consumers do, with retries and dying managers."""
    with rig(tmp_path, restarts=False) as on:
        counts = explore(on, Machine, histories=12, rules=40, first_seed=0)
    assert min(counts["retries_injected"], counts["crashes_injected"]) > 0


def test_both_stores_agree_after_a_crash_of_redis(tmp_path: Path) -> None:
    """With appendfsync always a SIGKILL leaves all that was acknowledged, and fences writers."""
    with rig(tmp_path, restarts=True) as on:
        counts = explore(on, Writers, histories=3, rules=20, first_seed=0)
    assert counts["store_restarts"] > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG if name in SLOW else ()) for name in BROKEN]
)
def test_the_machine_finds_a_broken_script(tmp_path: Path, name: str) -> None:
    """Negative control: one condition less in one script, and the stores disagree."""
    kind, script, protection, without, first_seed = BROKEN[name]
    with (
        rig(tmp_path, restarts=False, broken={script: (protection, without)}) as on,
        pytest.raises((AssertionError, ResponseError)),
    ):
        explore(on, kind, histories=400, rules=40, first_seed=first_seed, shrink=False)


OWN = Task(task_id="a", payload_json="{}", num_samples=1, purpose=Purpose.TRAIN, own=True)
CALLS: dict[str, Callable[[Store, str], Awaitable[object]]] = {
    "config": lambda store, run: store.runs.config(run),
    "version": lambda store, run: store.runs.version(run, Topic.READY),
    "submit": lambda store, run: store.runs.submit(run, [], 1),
    "lease_task": lambda store, run: store.runs.lease_task(run, (Purpose.TRAIN,), "n"),
    "lease_own_task": lambda store, run: store.runs.lease_own_task(run, OWN, "n"),
    "run": lambda store, run: store.runs.run(run),
    "end_run": lambda store, run: store.runs.end_run(run),
    "delete_run": lambda store, run: store.runs.delete_run(run),
    "admit_recorded": lambda store, run: store.runs.admit_recorded(run, []),
    "extend_tasks": lambda store, run: store.runs.extend_tasks(run, []),
    "register_rollout": lambda store, run: store.runs.register_rollout(run, "a", None),
    "listed": lambda store, run: store.runs.listed(run, 0, 1),
    "add_outbox_marks": lambda store, run: store.runs.add_outbox_marks(run, ["a"]),
    "unsettled": lambda store, run: store.runs.unsettled(run, 1),
    "expired": lambda store, run: store.runs.expired(run, 1),
    "settle": lambda store, run: store.runs.settle(
        run, [RolloutResult(rollout_id="a/0/1", finished=True)]
    ),
    "dead_letters": lambda store, run: store.runs.dead_letters(run, 0, 1),
    "requeue": lambda store, run: store.runs.requeue(run, ["a"]),
    "add_stored_tokens": lambda store, run: store.runs.add_stored_tokens(run, 1),
    "run_counts": lambda store, run: store.runs.run_counts(run),
    "reconcile": lambda store, run: store.ledger.reconcile(run, 0, "trainer"),
    "lease_samples": lambda store, run: store.ledger.lease_samples(run, 1, 1, 0, 0),
    "extend_samples": lambda store, run: store.ledger.extend_samples(run, 1, 1),
    "reject": lambda store, run: store.ledger.reject(run, 1, 1, {"a": "bad"}),
    "commit": lambda store, run: store.ledger.commit(run, 1, 1),
    "publish_wait": lambda store, run: store.ledger.publish_wait(run, 1, 1),
    "committed_steps": lambda store, run: store.ledger.committed_steps(run, ["a"]),
    "columns.lease": lambda store, run: store.columns.lease(run, "critic", (), 1, "n"),
    "columns.leased": lambda store, run: store.columns.leased(run, "critic", 1, ["a/0/1#t"]),
    "columns.complete": lambda store, run: store.columns.complete(run, "critic", 1, ["a/0/1#t"]),
    "columns.give_back": lambda store, run: store.columns.give_back(run, "critic", 1, ["a/0/1#t"]),
    "columns.fail": lambda store, run: store.columns.fail(
        run, "critic", 1, {"a/0/1#t": CellFailure("why", True)}
    ),
    "columns.backlog": lambda store, run: store.columns.backlog(run, "critic"),
    "columns.status": lambda store, run: store.columns.status(run, "", 1),
    "needed": lambda store, run: store.retention.needed(run, ["a"]),
    "due": lambda store, run: store.retention.due(run, 1),
    "forget": lambda store, run: store.retention.forget(
        run, [EndedGroup(task_id="a", attempts=(1,))]
    ),
    "windows": lambda store, run: store.tokens.windows(run, "a", [Cut("t", 0, 1)]),
    "inspection.newest": lambda store, run: store.inspection.newest(run, 0, 1),
    "inspection.rows": lambda store, run: store.inspection.rows(run, ["a"]),
    "inspection.keep": lambda store, run: store.inspection.keep(run, {"a": None}),
    "inspection.forget": lambda store, run: store.inspection.forget(run, ["a"]),
    "inspection.trim": lambda store, run: store.inspection.trim(run, 1),
    "inspection.of_group": lambda store, run: store.inspection.of_group(run, "a"),
    "inspection.of_step": lambda store, run: store.inspection.of_step(run, 1),
    "inspection.record_trained": lambda store, run: store.inspection.record_trained(
        run, 1, 1, [], 1
    ),
    "tokens": lambda store, run: store.tokens.tokens(run, "a", ["t"]),
}


@pytest.mark.parametrize("call", CALLS)
async def test_unknown_runs_and_rollouts_are_not_found(store: Store, call: str) -> None:
    """On every store, for every call that needs a run or the tokens of a rollout."""
    await refused(Reason.NOT_FOUND, CALLS[call](store, uuid.uuid4().hex))


async def test_an_unknown_turn_is_not_found(store: Store) -> None:
    """Also where its rollout exists."""
    run = Run(store, RUN_ID)
    await run.store.runs.create_run(RUN_ID, RULES)
    await run.start("free")
    await refused(Reason.NOT_FOUND, store.tokens.tokens(RUN_ID, "free", ["t"]))


async def test_tokens_beyond_a_finished_turn_leave_its_rollout_as_it_ended(store: Store) -> None:
    """The machine found that such an append failed rollouts that had finished well."""
    run = Run(store, uuid.uuid4().hex)
    await store.runs.create_run(run.run_id, RULES)
    await run.start("free")
    opened = await run.turn("free", "t", [1], [2])
    await run.finish("free")
    beyond = token_append(run.run_id, "free", "t", opened.epoch, 9, finish_reason=1)
    await refused(Reason.TURN_FINISHED, run.do(beyond))
    rollout = await store.tokens.rollout(run.run_id, "free")
    assert rollout is not None
    assert rollout.state is RolloutState.FINISHED
