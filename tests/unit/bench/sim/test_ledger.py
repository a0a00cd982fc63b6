"""The simulated trajectory manager: admission, order of leases, staleness."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from bench.sim.simulator import virtual_time
from bench.sim.simulator.ledger import Group, Ledger
from tests.lib.bench_sim.support import SINGLE

WORKLOAD = replace(SINGLE, group_size=2, groups_per_step=2)


def ledger(ahead: int) -> tuple[Ledger, list[Group]]:
    """One that admits `ahead` groups beyond those leased, and what it has begun."""
    begun: list[Group] = []
    return Ledger(WORKLOAD, 0, lambda leased: leased + ahead, begun.append), begun


def complete(ledger: Ledger, group: Group, version: int) -> None:
    """All its rollouts began under `version`, and end."""
    for rollout in range(WORKLOAD.group_size):
        group.oldest[rollout] = (version, version)
    for _ in range(WORKLOAD.group_size):
        ledger.ended(group)


async def test_no_more_is_admitted_than_may_be() -> None:
    """A lease makes room, a complete group alone does not."""
    book, begun = ledger(ahead=4)
    book.admit()
    book.admit()
    assert [group.number for group in begun] == [0, 1, 2, 3]
    for group in begun[:3]:
        complete(book, group, version=0)
    book.admit()
    assert (len(begun), book.ready) == (4, 3)
    book.lease(2, version=0, step=0)
    assert (len(begun), book.ready, book.leased) == (6, 1, 2)


async def test_the_first_complete_is_the_first_leased() -> None:
    """Whatever the order in which they were admitted; a group is complete with its last rollout."""
    book, begun = ledger(ahead=4)
    book.admit()
    book.ended(begun[0])
    assert book.ready == 0
    assert book.remaining_rollouts == 7
    for number in (2, 0, 3):
        begun[number].running = WORKLOAD.group_size
        complete(book, begun[number], version=0)
    assert [group.number for group in book.lease(2, 0, 0)] == [2, 0]
    assert not book.idle


async def test_staleness_is_that_of_the_oldest_token() -> None:
    """In versions, and in steps where publishes were put off."""
    book, begun = ledger(ahead=2)
    book.admit()
    for group in begun:
        complete(book, group, version=3)
    begun[1].oldest[1] = (1, 2)
    book.lease(2, version=4, step=7)
    assert book.staleness == [1, 3]
    assert book.lag == [4, 5]


async def test_a_publish_that_would_make_work_too_old_is_put_off() -> None:
    """Work in flight counts, work that is complete counts, work that has not begun does not."""
    book, begun = ledger(ahead=3)
    book.admit()
    assert book.may_publish(100, bound=0)
    begun[0].oldest[0] = (1, 1)
    assert book.may_publish(3, bound=2)
    assert not book.may_publish(4, bound=2)
    complete(book, begun[0], version=1)
    assert not book.may_publish(4, bound=2)
    book.lease(1, version=3, step=3)
    assert book.may_publish(4, bound=2)


def test_who_waits_is_woken_when_a_group_is_complete() -> None:
    """And only then: a negative control waits for ever."""

    async def main() -> int:
        book, begun = ledger(ahead=2)
        book.admit()
        waiting = asyncio.create_task(book.until(lambda: book.ready == 2))
        for group in begun:
            await asyncio.sleep(1.0)
            assert not waiting.done()
            complete(book, group, version=0)
        await waiting
        return book.ready

    assert virtual_time.run(main()) == 2
