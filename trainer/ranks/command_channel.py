"""Commands from rank 0 to all ranks, through the key-value store of torch.distributed.

An idle rank waits on the store, never inside a collective: a trainer may be suspended for longer
than the timeout of a collective.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.commands import (
    Command,
    Exit,
    Form,
    Leave,
    Optimize,
    Release,
    Restore,
    arrived,
    decode,
    encode,
    receive,
    send,
)
from trainer.ranks.lives import announced, life_name, life_of
from trainer.ranks.process_group import STARTED, LossWatch, RankInfo, form_group, leave_group
from trainer.ranks.worker import Worker

_ENDED = "ended"
_INTERRUPTED = "interrupted"
_ALONE = (Optimize, Release, Restore, Exit)
"""Commands that each rank carries out by itself: with replicas a `Measure` precedes `Optimize`."""


class RankFailedError(RuntimeError):
    """Another rank failed to execute a command."""


class RankLostError(RuntimeError):
    """A rank was killed, and the others have its part of the state: `form` a group without it."""


class Rank0:
    """Rank 0: gives commands to all ranks, itself included. Used by one thread."""

    def __init__(self, ranks: RankInfo, worker: Worker) -> None:
        self._ranks, self._worker = ranks, worker
        self._given = Counter[str]()  # commands, by life
        self._num_groups = 0
        self._lives = dict.fromkeys(range(ranks.world_size), 1)  # the newest of each rank
        self._num_lost = 0
        self._members = tuple(life_name(rank, 1) for rank in self._lives)
        self._replicas = self._wanted = ranks.replicas
        self._is_formed = True
        ranks.store.set(STARTED, "")

    @property
    def world_size(self) -> int:
        """Number of ranks in the process group."""
        return len(self._members)

    @property
    def members(self) -> tuple[str, ...]:
        """The lives of ranks in the process group."""
        return self._members

    @property
    def replicas(self) -> int:
        """Copies of the models in the process group."""
        return self._replicas

    @property
    def max_replicas(self) -> int:
        """Copies of the models on all ranks."""
        return self._ranks.replicas

    @property
    def wanted_replicas(self) -> int:
        """Copies of the models once `form` has taken in or let go the ranks that differ."""
        return self._wanted

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank that is not lost; empty names: not given."""
        return tuple(self._ranks.nodes[life_of(name)[0]] for name in self._left())

    def nodes_of(self, replicas: int) -> tuple[str, ...]:
        """The node of each rank of the first `replicas` copies."""
        return self._ranks.nodes[: replicas * self._unit]

    def want(self, replicas: int) -> None:
        """Set the number of model copies of the next group that `form` makes with `join`.

        Raises:
            ValueError: it is not within 1 and the copies on all ranks.
        """
        if not 1 <= replicas <= self.max_replicas:
            raise ValueError(
                f"replicas is {replicas}: give 1 to {self.max_replicas}, trainer.replicas at start"
            )
        self._wanted = replicas

    @property
    def watch(self) -> LossWatch | None:
        """Of the present group; None: there is one replica."""
        return self._ranks.watch

    @property
    def store(self) -> Store:
        return self._ranks.store

    @property
    def worker(self) -> Worker:
        return self._worker

    def do(self, command: Command) -> list[dict[str, float]]:
        """Give all ranks the same command; their answers in rank order."""
        return self.do_each([command] * self.world_size)

    def do_each(self, commands: Sequence[Command]) -> list[dict[str, float]]:
        """Give each rank its own command; their answers in rank order, when all are done.

        What a rank does by itself is done by those that are not lost.

        Raises:
            RankFailedError: another rank failed; the trainer restarts from its checkpoint.
            RankLostError: a rank was lost, and what the ranks do together is not done.
        """
        alone = isinstance(commands[0], _ALONE)
        self._note_lives()
        if not alone:
            self._check_whole({})
        given = dict(zip(self._members, commands, strict=True))
        answers = self._exchange({name: given[name] for name in self._left()})
        self._note_lives()
        if not alone:
            self._check_whole(answers)
        return [answers[name] for name in self._left() if name in answers]

    def form(self, *, join: bool = False) -> bool:
        """Form a group of the ranks that are left, if one was lost, and give each its state.

        Args:
            join: also if ranks that are wanted wait, which then join, or if others are in it, which
                then leave.

        Returns:
            Whether there is a new group; the gradient of the step is forgotten then.

        Raises:
            RankFailedError: no rank is left that has some part of the state.
        """
        before = self._members
        self._note_lives()
        while not self._is_formed or self._left() != self._members or (join and self._differs()):
            members = self._next_members() if join else self._left()
            # A rank that dies while it joins may do so again: the next time it is left out.
            self._try_form(members)
            join = False
        return self._members is not before

    def _try_form(self, members: tuple[str, ...]) -> None:
        sources = self._sources(members)
        if sources is None:
            raise RankFailedError("ranks were lost that had the only copy of a part")
        num_replicas, rest = divmod(len(members), self._unit)
        form = Form(
            number=self._num_groups,
            members=members,
            replicas=1 if rest else num_replicas,
            sources=sources,
            num_lost=self._num_lost,
        )
        self._num_groups += 1
        before, self._is_formed = self._members, False
        answers = self._exchange(dict.fromkeys(members, form))
        self._note_lives()
        if len(answers) == len(members) and not _interrupted(answers):
            self._members, self._replicas, self._is_formed = members, form.replicas, True
        self._let_go({*before, *members} - set(self._members))

    def _let_go(self, names: set[str]) -> None:
        """Let ranks leave that are in no group: only now, as they had a copy of the state."""
        self._exchange(dict.fromkeys(sorted(names & set(self._newest())), Leave()))

    def _sources(self, members: tuple[str, ...]) -> tuple[int, ...] | None:
        """Who of a new group has each part of the state of the present one; None: not all has."""
        num_parts = len(self._members) // self._replicas
        found = []
        for part in range(num_parts):
            holders = [name for name in self._members[part::num_parts] if name in members]
            if not holders:
                return None
            found.append(members.index(holders[0]))
        return tuple(found)

    def _check_whole(self, answers: Mapping[str, Mapping[str, float]]) -> None:
        """Raise `RankLostError` unless the group is whole and nobody was interrupted."""
        lost = sorted(set(self._members) - set(self._left()))
        if _interrupted(answers):  # also by the loss of a rank that was in no group
            self._is_formed = False
        if lost or not self._is_formed:
            ranks = ", ".join(str(life_of(name)[0]) for name in lost) or "none, but one that waited"
            raise RankLostError(f"of {self.world_size} ranks, these were lost: {ranks}")

    def _note_lives(self) -> None:
        """Take note of ranks that were lost, and wait in another life."""
        if self._ranks.replicas > 1:
            for name in announced(self._ranks.store, self._num_lost):
                rank, life = life_of(name)
                self._lives[rank] = life
                self._num_lost += 1

    def _left(self) -> tuple[str, ...]:
        """The members of the group that are not lost."""
        return tuple(name for name in self._members if name in self._newest())

    def _newest(self) -> tuple[str, ...]:
        return tuple(life_name(rank, life) for rank, life in self._lives.items())

    @property
    def _unit(self) -> int:
        """Ranks of one copy of the models when none is lost."""
        return self._ranks.world_size // self._ranks.replicas

    def _wished(self) -> tuple[str, ...]:
        return self._newest()[: self._wanted * self._unit]

    def _differs(self) -> bool:
        return self._wished() != self._members

    def _next_members(self) -> tuple[str, ...]:
        """Those that are wanted; all, if a part of the state is on others alone."""
        wished = self._wished()
        return wished if self._sources(wished) is not None else self._newest()

    def _exchange(self, given: Mapping[str, Command]) -> dict[str, dict[str, float]]:
        """Give commands to lives of ranks; the answers of those not lost."""
        ends = any(isinstance(command, Exit) for command in given.values())
        if ends:
            self._ranks.store.set(_ENDED, "")
        own, others = self._ranks.name, [name for name in given if name != self._ranks.name]
        for name in others:
            send(self._ranks.store, f"command/{name}/{self._given[name]}", encode(given[name]))
            self._given[name] += 1
        answers = {}
        if own in given:
            answers[own] = _carry_out(self._ranks, self._worker, given[own])
        if ends:  # ranks end without answering it
            return answers
        found = {name: self._answer(name) for name in others}
        return answers | {name: answer for name, answer in found.items() if answer is not None}

    def _answer(self, name: str) -> dict[str, float] | None:
        """That of a life to its newest command; None if it is lost."""
        key = f"answer/{name}/{self._given[name] - 1}"
        while not arrived(self._ranks.store, key):
            self._note_lives()
            if name not in self._newest():
                return None
        answer = json.loads(receive(self._ranks.store, key))
        if "storage" in answer:
            raise OSError(f"rank {name}: {answer['storage']}")
        if "error" in answer:
            raise RankFailedError(f"rank {name}: {answer['error']}")
        results: dict[str, float] = answer
        return results


def worker_loop(ranks: RankInfo, worker: Worker, grace_seconds: float) -> None:
    """Execute rank 0's commands until Exit.

    After SIGTERM, rank 0 has `grace_seconds` to finish its step and send Exit.
    """
    graceful_exit = _GracefulExit(grace_seconds)
    number = 0
    while not graceful_exit.is_due():
        key = f"command/{ranks.name}/{number}"
        if not arrived(ranks.store, key):
            if worker.is_idle and ranks.store.check([_ENDED]):
                return
            continue
        command = decode(receive(ranks.store, key))
        answer = f"answer/{ranks.name}/{number}"
        try:
            results = _carry_out(ranks, worker, command)
        except Exception as error:
            kind = "storage" if isinstance(error, OSError) else "error"
            failure = {kind: f"{type(error).__name__}: {error}"}
            send(ranks.store, answer, json.dumps(failure).encode())
            raise
        if isinstance(command, Exit):
            return
        send(ranks.store, answer, json.dumps(results).encode())
        number += 1


def _interrupted(answers: Mapping[str, Mapping[str, float]]) -> bool:
    return any(_INTERRUPTED in answer for answer in answers.values())


def _carry_out(ranks: RankInfo, worker: Worker, command: Command) -> dict[str, float]:
    """The results of a command; `_INTERRUPTED` if it failed and a rank of the group was lost."""
    try:
        with ranks.at_work():
            if isinstance(command, Form):
                form_group(ranks, command)
            answer = worker.do(command)
            if isinstance(command, Leave):
                leave_group(ranks)
            return answer
    except RuntimeError:
        if not ranks.lost_one():
            raise
        return {_INTERRUPTED: 1.0}


class _GracefulExit:
    """Turns SIGTERM and SIGINT into a deadline: all ranks get the signal, but rank 0 decides."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._deadline = float("inf")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def is_due(self) -> bool:
        """True when the grace period after a signal is over."""
        return time.monotonic() > self._deadline

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._deadline = min(self._deadline, time.monotonic() + self._grace_seconds)
