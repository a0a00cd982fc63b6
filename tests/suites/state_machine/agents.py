"""Rules of agents and gateways: tasks, leases, rollouts, turns, tokens."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import Reason
from services.lib.token_bytes import pack_ids
from tests.lib.trajectory_manager.support import (
    CREDENTIAL,
    ENV,
    failed,
    policy,
    rewarded,
    rollout_finish,
    token_append,
    tokens,
)
from tests.suites.state_machine.base import (
    LOST,
    PICK,
    RUN_ID,
    STEPS,
    Base,
    Held,
    Writing,
    picked,
)
from trajectory_manager.model import sampling as stored_sampling
from trajectory_manager.model.records import (
    FailureClass,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    Task,
    TaskLease,
)
from trajectory_manager.model.tokens import (
    Appended,
    Tokens,
    VersionSource,
)

OUTCOMES = (
    rewarded(0.0),
    rewarded(1.0),
    rewarded(1.0),
    rewarded(1 / 3),
    failed(),
    failed(FailureClass.INFRASTRUCTURE),
    Outcome(failure_class=FailureClass.POLICY, rewards=(Reward(name="reward", value=-0.0),)),
    Outcome(
        rewards=(Reward(name="other", value=2.0), Reward(name="reward", value=1.0, turn_id="t0"))
    ),
    Outcome(rewards=(Reward(name="reward", value=1.0),), untrained_turn_ids=("t0",)),
    Outcome(),
)
SAMPLINGS = ("{}", "{}", "{}", '{"temperature":0.5}', '{"temperature":0.0}')
TRAIN_MOSTLY = st.sampled_from([Purpose.TRAIN, Purpose.TRAIN, Purpose.TRAIN, Purpose.EVAL])
PURPOSES = ((Purpose.EVAL, Purpose.TRAIN), (Purpose.TRAIN,), (Purpose.EVAL,))
GOOD = st.sampled_from([rewarded(0.0), rewarded(1.0), rewarded(1 / 3)])
WORK: dict[str, Any] = {
    "number": st.integers(1, 3),
    "outcomes": st.lists(GOOD | GOOD | st.sampled_from(OUTCOMES), min_size=1, max_size=4),
    "version": st.integers(0, 1),
    "steps": STEPS,
}


class Agents(Base):
    """Tasks come, are leased, played, finished or lost."""

    num_nonces = 0

    @rule(number=st.integers(1, 3), purpose=TRAIN_MOSTLY, old=PICK, lost=LOST)
    def submit(self, number: int, purpose: Purpose, old: int, lost: bool) -> None:
        """New tasks, now and then one again, or one that is another by now."""
        first = self.num_tasks + 1
        self.num_tasks += number
        tasks = [self.task(n, purpose) for n in range(first, first + number)]
        if old < 300 and first > 1:
            tasks.append(self.task(first - 1, purpose))
        self.both(
            lambda on: on.store.runs.submit(RUN_ID, tasks, 12),
            lost=lost,
            stable=lambda answer: getattr(answer, "num_free", answer),
        )

    def task(self, number: int, purpose: Purpose) -> Task:
        """The task of this number."""
        size = self.config.group_size
        return Task(task_id=f"task-{number}", payload_json="{}", num_samples=size, purpose=purpose)

    @rule(purposes=st.sampled_from(PURPOSES), lost=LOST)
    def lease(self, purposes: tuple[Purpose, ...], lost: bool) -> None:
        """An agent leases a task; the lease of a lost response expires."""
        self.take(purposes)
        if lost and self.held:
            self.held.pop()

    def take(self, purposes: tuple[Purpose, ...] = PURPOSES[0]) -> Held | None:
        """Lease one task."""
        self.num_nonces += 1
        nonce = f"nonce-{self.num_nonces}"
        return self.took(self.both(lambda on: on.store.runs.lease_task(RUN_ID, purposes, nonce)))

    def took(self, lease: Any) -> Held | None:
        """What an agent holds of this answer."""
        if not isinstance(lease, TaskLease):
            return None
        assert lease.rollout_id not in self.names, "a rollout was named twice"
        self.names.add(lease.rollout_id)
        self.held.append(Held(lease.rollout_id, lease.nonce, lease.task.purpose))
        return self.held[-1]

    @precondition(lambda self: self.held)
    @rule(number=PICK, stolen=st.sampled_from([False] * 9 + [True]), steps=STEPS)
    def start(self, number: int, stolen: bool, steps: int | None) -> None:
        """An agent opens the rollout it leased, or one it did not."""
        held = picked(self.held, number)
        self.open(held, "stolen" if stolen else held.nonce, steps)

    def open(self, held: Held, nonce: str | None, steps: int | None = None) -> bool:
        """Open a rollout."""
        rollout = Rollout(
            run_id=RUN_ID,
            rollout_id=held.rollout_id,
            purpose=held.purpose,
            credential_digest=CREDENTIAL,
        )
        answer = self.flow(lambda rollouts, _, on: rollouts.start(rollout, nonce), steps)
        held.started = held.started or (isinstance(answer, str) and answer != "killed")
        return held.started

    @rule(number=st.sampled_from([1, 2]))
    def start_unleased(self, number: int) -> None:
        """An agent starts a rollout without a lease."""
        held = Held(f"free-{number}", "", Purpose.EVAL)
        if held.rollout_id not in self.names:
            self.names.add(held.rollout_id)
            self.held.append(held)
        self.open(held, None)

    @precondition(lambda self: self.held)
    @rule(
        number=PICK,
        turn=st.sampled_from([0, 0, 1, 2]),
        attempt=st.sampled_from("aab"),
        length=st.integers(1, 8),
        fork=st.sampled_from([0, 0, 0, 1, 2]),
        parent=st.sampled_from(["", "", "", "t0", "t9"]),
        steps=STEPS,
        sampling=st.sampled_from(SAMPLINGS),
    )
    def begin(
        self,
        number: int,
        turn: int,
        attempt: str,
        length: int,
        fork: int,
        parent: str,
        steps: int | None,
        sampling: str,
    ) -> None:
        """A gateway opens a turn, again, or as another attempt; prompts share prefixes."""
        ids = [n if n <= length - fork else 100 + n for n in range(1, length + 1)]
        self.opened(picked(self.held, number), f"t{turn}", attempt, ids, parent, steps, sampling)

    @precondition(lambda self: self.turns)
    @rule(number=PICK, attempt=st.sampled_from("abc"))
    def reopen(self, number: int, attempt: str) -> None:
        """A restarted gateway continues a turn, or another one takes it over."""
        turn = picked(list(self.turns.values()), number)
        held = Held(turn.rollout_id, "", Purpose.TRAIN)
        self.opened(held, turn.turn_id, attempt, turn.prompt)

    def opened(
        self,
        held: Held,
        turn_id: str,
        attempt: str,
        ids: list[int],
        parent: str = "",
        steps: int | None = None,
        sampling: str = "{}",
    ) -> Writing | None:
        """Open a turn."""
        new = pb.NewTurn(
            run_id=RUN_ID,
            rollout_id=held.rollout_id,
            turn_id=turn_id,
            attempt_id=attempt,
            parent_turn_id=parent,
            token_ids=pack_ids(ids),
            sampling=stored_sampling.message(sampling),
            credential_digest=CREDENTIAL,
        )
        answers = self.wait(
            self.pair.flow(
                lambda rollouts, _, on: rollouts.begin_turn(new),
                steps,
            )
        )
        real, model = answers
        if not isinstance(model, pb.BegunTurn):
            return None
        key = (held.rollout_id, turn_id)
        writing = self.turns.setdefault(key, Writing(*key, prompt=ids))
        writing.prefix = len(model.prefix_token_ids) // 4
        writing.length = len(model.tokens.token_ids) // 4
        self._learn_epoch(writing, real.epoch, model.epoch)
        return writing

    def _learn_epoch(self, writing: Writing, real: int, model: int) -> None:
        """Both keep the epoch, or both give out a greater one."""
        if not writing.epochs or (real, model) == writing.epochs[-1]:
            writing.epochs[-1:] = [(real, model)]
            return
        newest = writing.epochs[-1]
        assert real > newest[0], "a taken-over turn got no greater epoch"
        assert model > newest[1], "a taken-over turn got no greater epoch in the model"
        writing.epochs.append((real, model))

    @precondition(lambda self: self.turns)
    @rule(
        numbers=st.lists(PICK, min_size=1, max_size=3),
        shift=st.sampled_from([0, 0, 0, 0, 0, 0, -1, -1, -2, -2, 1]),
        other=st.sampled_from([0, 0, 0, 0, 100]),
        size=st.integers(0, 4),
        kind=st.integers(0, 3),
        version=st.integers(0, 2),
        end=st.sampled_from([0, 0, 1, 2]),
        stale=st.sampled_from([False] * 5 + [True]),
        lost=LOST,
    )
    def append(self, numbers: list[int], stale: bool, lost: bool, **facts: int) -> None:
        """A batch of chunks: right, repeated, others in their place, beyond a gap, too late."""
        written = [picked(list(self.turns.values()), number) for number in numbers]
        epochs = [w.epochs[0] if stale else w.epochs[-1] for w in written]
        appends = [self.chunk(writing, **facts) for writing in written]
        answer = self.both(
            lambda on: on.store.tokens.append(
                [
                    _with_epoch(append, epoch[on.index])
                    for append, epoch in zip(appends, epochs, strict=True)
                ]
            ),
            lost=lost,
            stable=_stored,
        )
        for writing, appended in zip(written, answer, strict=True):
            if isinstance(appended, Appended):
                writing.length = appended.num_tokens

    def chunk(
        self, writing: Writing, shift: int, other: int, size: int, kind: int, version: int, end: int
    ) -> pb.TokenAppend:
        """Tokens that follow from their position, at the end of the turn or near it."""
        offset = max(0, writing.length + shift)
        ids = [writing.prefix + n + 1 + other for n in range(offset, offset + size)]
        return token_append(
            RUN_ID,
            writing.rollout_id,
            writing.turn_id,
            0,
            offset,
            spans_of(ids, kind, max(0, self.step - version)),
            finish_reason=end,
            message_key="key" * (end - 1),
        )

    @rule(**WORK)
    def work(self, number: int, outcomes: list[Outcome], version: int, steps: int | None) -> None:
        """Tasks come and are played, one rollout after the other."""
        self.submit(number, Purpose.TRAIN, 999, lost=False)
        for turn in range(number * (self.config.group_size + 1)):
            self.play(picked(outcomes, turn), version, steps if turn == 0 else None)

    def play(self, outcome: Outcome, version: int, steps: int | None = None) -> None:
        """One whole rollout."""
        held = self.take()
        if held is None or not self.open(held, held.nonce):
            return
        assert self.opened(held, "t0", "a", [1, 2]) is not None, "it has just begun"
        self.append(
            numbers=[list(self.turns).index((held.rollout_id, "t0"))],
            stale=False,
            lost=False,
            shift=0,
            other=0,
            size=4,
            kind=2,
            version=version,
            end=1,
        )
        self.end(held, outcome, steps)
        if steps is None:
            self.held.remove(held)
            del self.turns[held.rollout_id, "t0"]

    @precondition(lambda self: self.held)
    @rule(number=PICK, outcome=st.sampled_from(OUTCOMES), steps=STEPS)
    def finish(self, number: int, outcome: Outcome, steps: int | None) -> None:
        """An agent finishes a rollout, maybe again, maybe with another outcome."""
        self.end(picked(self.held, number), outcome, steps)

    def end(self, held: Held, outcome: Outcome, steps: int | None) -> None:
        """Finish a rollout."""
        self.flow(
            lambda rollouts, _, on: rollouts.finish(
                RUN_ID, [rollout_finish(held.rollout_id, outcome)]
            ),
            steps,
        )

    @precondition(lambda self: self.held)
    @rule(
        number=PICK, outcome=st.sampled_from(OUTCOMES), by=st.sampled_from(["", CREDENTIAL, "no"])
    )
    def close(self, number: int, outcome: Outcome, by: str) -> None:
        """A record is finished, but not settled."""
        ending = rollout_finish(picked(self.held, number).rollout_id, outcome, by or None)
        self.both(lambda on: on.store.tokens.finish(RUN_ID, [ending]), lost=bool(by))

    @precondition(lambda self: self.held)
    @rule(number=PICK)
    def let_go(self, number: int) -> None:
        """An agent vanishes."""
        self.held.remove(picked(self.held, number))

    @precondition(lambda self: self.names)
    @rule(numbers=st.lists(PICK, max_size=4), lost=LOST)
    def extend(self, numbers: list[int], lost: bool) -> None:
        """Agents that live extend their leases; a recorded rollout has no proof."""
        held = [picked(self.held, number) for number in numbers if self.held]
        proofs = [(one.rollout_id, one.nonce) for one in held]
        proofs += [(picked(sorted(self.names), number), "") for number in numbers[:1]]
        self.both(lambda on: on.store.runs.extend_tasks(RUN_ID, proofs), lost=lost)

    @precondition(lambda self: self.names)
    @rule(number=PICK, announce=st.booleans(), lost=LOST)
    def settle(self, number: int, announce: bool, lost: bool) -> None:
        """A manager settles what it has heard of, closed or not."""
        name = picked(sorted(self.names), number)
        if announce:
            self.both(lambda on: on.store.runs.add_outbox_marks(RUN_ID, [name]), lost=lost)
        else:
            self.flow(lambda rollouts, _, on: rollouts.settle(RUN_ID, [name]))

    @rule(seconds=st.sampled_from([0, 31, 61, 61]), steps=STEPS)
    def sweep(self, seconds: int, steps: int | None) -> None:
        """Time passes, leases run out, and the sweeper does what others left."""
        self.pair.clock.tick(seconds)
        self.flow(lambda rollouts, _, on: rollouts.sweep(RUN_ID), steps)


def spans_of(ids: list[int], kind: int, version: int) -> Tokens:
    """Of the environment, sampled, first one and then the other, or of unknown weights."""
    if kind == 2 and len(ids) > 1:
        return tokens(ids[:1], ENV).joined(tokens(ids[1:], policy(version)))
    spans = (ENV, policy(version), policy(version), policy(version, VersionSource.UNKNOWN))
    return tokens(ids, spans[kind]) if ids else Tokens()


def _with_epoch(append: pb.TokenAppend, epoch: int) -> pb.TokenAppend:
    made = pb.TokenAppend()
    made.CopyFrom(append)
    made.epoch = epoch
    return made


def _stored(answers: Any) -> Any:
    """What a repeated batch returns again: a gap has failed the rollout by then."""
    closed = (Reason.OFFSET_GAP, Reason.ROLLOUT_FINISHED)
    return [
        answer.num_tokens
        if isinstance(answer, Appended)
        else "closed"
        if answer.reason in closed
        else answer
        for answer in answers
    ]
