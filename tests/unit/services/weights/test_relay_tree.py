"""Broadcast trees reach all servers, bound the fan-out, and share the uplinks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.weights.servicer import member, parent, servers_of_zone

servers_of = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=40).map(sorted)
trees_of = st.integers(1, 8)
fanouts = st.integers(1, 4)
zones = st.sampled_from(["", "east", "west"])


@given(servers_of, trees_of, fanouts)
def test_every_server_is_reached_from_one_root(servers: list[str], trees: int, fanout: int) -> None:
    """In each tree one server asks the weights service, and all others hang below it."""
    for tree in range(trees):
        up = {s: parent(servers, s, tree=tree, trees=trees, fanout=fanout) for s in servers}
        assert list(up.values()).count(None) == 1
        for server in servers:
            at: str | None = server
            for _ in servers:
                at = up[at] if at is not None else None
            assert at is None


@given(servers_of, trees_of, fanouts)
def test_no_server_has_more_children_than_the_fanout(
    servers: list[str], trees: int, fanout: int
) -> None:
    """The bound holds in every tree."""
    for tree in range(trees):
        children = Counter(
            parent(servers, s, tree=tree, trees=trees, fanout=fanout) for s in servers
        )
        del children[None]
        assert max(children.values(), default=0) <= fanout


@given(servers_of, trees_of, fanouts)
def test_trees_have_different_roots(servers: list[str], trees: int, fanout: int) -> None:
    """As many servers fetch from the weights service as there are trees, each in one of them."""
    roots = {
        server
        for tree in range(trees)
        for server in servers
        if parent(servers, server, tree=tree, trees=trees, fanout=fanout) is None
    }
    assert len(roots) == min(trees, len(servers))


@given(servers_of, trees_of, fanouts, st.data())
def test_sources_that_are_left_come_before_whom_they_send_to(
    servers: list[str], trees: int, fanout: int, data: st.DataObject
) -> None:
    """One of them asks the weights service; with any others lost too, sources come before still."""
    lost = data.draw(st.sets(st.sampled_from(servers), max_size=len(servers) - 1))
    more = lost | data.draw(st.sets(st.sampled_from(servers)))
    left = [server for server in servers if server not in lost]
    for tree in range(min(trees, len(servers))):
        start = tree * len(servers) // min(trees, len(servers))
        order = [*servers[start:], *servers[:start]]
        shape = {"tree": tree, "trees": trees, "fanout": fanout}
        sources = [parent(servers, server, **shape, lost=lost) for server in left]
        assert sources.count(None) == 1
        assert not lost & set(sources)
        for server in left:
            for gone in (lost, more):
                source = parent(servers, server, **shape, lost=gone)
                assert source is None or order.index(source) < order.index(server)


def test_many_trees_share_the_uplinks() -> None:
    """With as many trees as servers all send equally much; with one, half of them send nothing."""
    servers = [f"server-{number:02d}" for number in range(16)]

    def sent(trees: int) -> Counter[str | None]:
        return Counter(
            parent(servers, server, tree=tree, trees=trees, fanout=2)
            for tree in range(16)
            for server in servers
        )

    shared = [sent(16)[server] for server in servers]
    assert set(shared) == {15}
    # Negative control: one tree alone leaves its leaves idle.
    assert sorted(sent(1)[server] for server in servers)[:8] == [0] * 8


def test_an_unknown_server_fetches_from_the_weights_service() -> None:
    """A server that does not relay has no parent and no children."""
    assert parent(["a", "b"], "c", tree=0, trees=2, fanout=2) is None


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}:[0-9]{1,4}", fullmatch=True), zones))
def test_each_zone_has_its_own_servers(zone_by_address: dict[str, str]) -> None:
    """Also the one without a name; a server is in no other."""
    members = [member(zone, address) for address, zone in zone_by_address.items()]
    for zone in ("", "east", "west"):
        expected = sorted(each for each, found in zone_by_address.items() if found == zone)
        assert servers_of_zone(members, zone) == expected
