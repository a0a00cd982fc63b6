"""Policies on their own: who gets a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.gateway.dispatch import policies
from rollout.gateway.dispatch.policies import (
    BUILT_IN,
    CacheFirst,
    Candidate,
    LeastLoad,
    LongestFirst,
    PrefixAffinity,
    TurnRequest,
    load_dispatch,
)
from services.chassis.errors import ConfigError

least_load = LeastLoad().choose
prefix_affinity = PrefixAffinity().choose
LOADS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 64)), min_size=1, max_size=8)


def request(
    group: str = "task",
    expected_tokens: float = 32.0,
    arrived: float = 0.0,
    *,
    rollout: str = "",
    continues: bool = False,
) -> TurnRequest:
    """A turn of a group."""
    return TurnRequest(
        group=group,
        rollout=rollout or group,
        num_tokens=100,
        max_new_tokens=1 << 20,
        expected_tokens=expected_tokens,
        arrived=arrived,
        continues=continues,
    )


def candidate(server_id: str, num_turns: int = 0, max_running: int = 32) -> Candidate:
    """A server with some load."""
    return Candidate(
        server_id=server_id, num_turns=num_turns, max_running=max_running, tokens_per_second=0.0
    )


def spread(groups: list[str], servers: list[str]) -> dict[str, str]:
    """The server of each group, one after the other, with the loads that this makes."""
    loads = Counter[str]()
    chosen = {}
    for group in groups:
        candidates = [candidate(name, loads[name]) for name in servers]
        chosen[group] = prefix_affinity(request(group), candidates).server_id
        loads[chosen[group]] += 1
    return chosen


def test_least_load_counts_shares_of_slots() -> None:
    """Ten turns of 64 are less than six of 32."""
    busy, idle = candidate("a", 6, 32), candidate("b", 10, 64)
    assert least_load(request(), [busy, idle]) is idle


def test_a_group_stays_where_its_prefix_is() -> None:
    """Whatever order the servers are listed in."""
    servers = [candidate(name, num_turns=4) for name in "abcd"]
    first = prefix_affinity(request(), servers)
    assert prefix_affinity(request(), servers[::-1]) is first
    assert len({prefix_affinity(request(str(i)), servers).server_id for i in range(64)}) == 4


def test_a_group_leaves_a_server_that_is_too_busy() -> None:
    """Its next server takes what is beyond 1.25 shares, and the same one each time."""
    names = list("abcd")
    home = prefix_affinity(request(), [candidate(name) for name in names]).server_id
    crowded = [candidate(name, 13 if name == home else 9) for name in names]
    second = prefix_affinity(request(), crowded)
    assert second.server_id != home
    assert prefix_affinity(request(), crowded[::-1]) is second


def test_a_group_stays_while_its_server_is_within_the_bound() -> None:
    """Control of the test above: more turns than the others have are no reason to leave."""
    names = list("abcd")
    home = prefix_affinity(request(), [candidate(name) for name in names]).server_id
    some = [candidate(name, 11 if name == home else 9) for name in names]
    assert prefix_affinity(request(), some).server_id == home


def test_a_server_that_leaves_moves_no_other_group() -> None:
    """As long as no server is at its bound."""
    groups = [f"task-{number}" for number in range(12)]
    before = {
        g: prefix_affinity(request(g), [candidate(n) for n in "abcd"]).server_id for g in groups
    }
    after = {
        g: prefix_affinity(request(g), [candidate(n) for n in "abc"]).server_id for g in groups
    }
    assert {g for g in groups if before[g] != after[g]} == {g for g in groups if before[g] == "d"}


@given(LOADS)
def test_some_server_always_has_room(loads: list[tuple[int, int]]) -> None:
    """Also one that reports no slots; no server gets more than 1.25 shares, rounded up."""
    servers = [candidate(str(i), turns, slots) for i, (turns, slots) in enumerate(loads)]
    chosen = prefix_affinity(request(), servers)
    total_slots = sum(max(server.max_running, 1) for server in servers)
    share = (1 + sum(server.num_turns for server in servers)) / total_slots
    assert chosen.num_turns + 1 <= 1.25 * share * max(chosen.max_running, 1) + 1


def test_many_groups_spread() -> None:
    """256 turns on four servers: each has between half and 1.25 of its share."""
    counts = Counter(spread([str(i) for i in range(256)], list("abcd")).values())
    assert all(32 <= number <= 80 for number in counts.values())


def test_each_rollout_of_a_group_comes_back_to_a_server_of_its_own() -> None:
    """Turn by turn in any order, where agents use half of the slots: its history is cached there.

    Control: by their group they wander, as one server is too busy for all of them.
    """
    rollouts = [f"task/{slot}" for slot in range(32)]
    assert moved(CacheFirst().choose, rollouts) < 0.1
    assert moved(PrefixAffinity().choose, rollouts) > 0.5


def test_servers_of_rollouts_that_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first; a rollout that is still there is given a server like a new one."""
    monkeypatch.setattr(policies, "_MAX_REMEMBERED", 2)
    policy, servers = CacheFirst(), [candidate(name) for name in "abcd"]
    for number in range(50):
        policy.choose(request(rollout=str(number)), servers)
    assert list(policy._last) == ["48", "49"]
    assert policy.choose(request(rollout="0"), servers) in servers


def moved(
    choose: Callable[[TurnRequest, Sequence[Candidate]], Candidate], rollouts: list[str]
) -> float:
    """The share of turns on another server than the turn before, a third of the agents at tools."""
    random, before, loads = Random(0), dict[str, str](), Counter[str]()
    playing: list[str] = []
    num_moved = num_turns = 0
    for _ in range(2000):
        if len(playing) < 2 * len(rollouts) // 3:
            rollout = random.choice([name for name in rollouts if name not in playing])
            candidates = [candidate(name, loads[name]) for name in "abcd"]
            server = choose(request("task", rollout=rollout), candidates).server_id
            num_turns += rollout in before
            num_moved += before.get(rollout, server) != server
            before[rollout] = server
            loads[server] += 1
            playing.append(rollout)
        else:
            loads[before[playing.pop(random.randrange(len(playing)))]] -= 1
    return num_moved / num_turns


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_policies_have_names(name: str) -> None:
    """And each of them takes the only server there is."""
    only = candidate("only", 1000, 1)
    assert load_dispatch(name).choose(request(), [only]) is only


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_continued_turns_come_first(name: str) -> None:
    """Whatever the policy's order of new turns: their agents have waited already."""
    policy = load_dispatch(name)
    old = policy.order(request(expected_tokens=1, arrived=100.0, continues=True))
    assert old < policy.order(request(expected_tokens=1e9, arrived=0.0))


def test_the_longest_of_those_that_come_together_is_first() -> None:
    """So that none of them is left alone at the end."""
    order = LongestFirst().order
    lengths = [10, 4000, 1, 300, 299]
    asks = [request(expected_tokens=length, arrived=5.0) for length in lengths]
    assert [a.expected_tokens for a in sorted(asks, key=order)] == sorted(lengths, reverse=True)


class Greedy(LeastLoad):
    """Longest first without a bound: the negative control."""

    def order(self, turn: TurnRequest) -> float:
        """However long the others have waited."""
        return -turn.expected_tokens


@given(st.floats(1, 1e7), st.floats(1, 1e7), st.floats(0, 1e6))
def test_no_turn_is_overtaken_by_one_that_came_30_seconds_later(
    short: float, long: float, arrived: float
) -> None:
    """Short turns wait for concurrent arrivals only, not for later ones."""
    first, later = request("a", short, arrived), request("b", long, arrived + 30.0)
    assert LongestFirst().order(first) <= LongestFirst().order(later)


def test_without_the_bound_short_turns_starve() -> None:
    """Negative control of the test above."""
    first, later = request("a", 1, 0.0), request("b", 1000, 1e6)
    assert Greedy().order(first) > Greedy().order(later)


def test_anyones_own_policy_is_made_by_its_name() -> None:
    """A class, or anything else that gives a policy when called."""
    assert isinstance(load_dispatch(f"{__name__}:Greedy"), Greedy)


def test_an_unknown_policy_is_told_with_the_known_ones() -> None:
    """A wrong name in a config file ends the start."""
    with pytest.raises(ConfigError, match=r"least_load.*prefix_affinity"):
        load_dispatch("fastest")
