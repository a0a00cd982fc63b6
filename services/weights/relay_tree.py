"""Broadcast trees: the source of each file for each server, so that each file is sent about once.

Several broadcast trees over the same servers (StreamRL, arXiv 2504.15930, section 5): tree `t` is a
heap whose order is the sorted servers, rotated, so that each tree has another root and other inner
nodes. File `i` of a version travels down tree `i mod trees`: all uplinks share the work. Trees need
no coordination: they are a function of the live servers, and a server that joins or leaves changes
only a few edges of the next version.

Each zone has trees of its own, whose roots are its leaders: over a slow link between two zones each
file travels about once, whatever the number of servers beyond it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_SEPARATOR = "|"
"""Between zone and address; an older service takes the whole for an address, which none has."""


def member(zone: str, address: str) -> str:
    """How a server of a zone is registered."""
    return f"{zone}{_SEPARATOR}{address}" if zone else address


def servers_of_zone(members: Sequence[str], zone: str) -> list[str]:
    """Addresses of the registered servers of a zone, sorted."""
    pairs = (each.rpartition(_SEPARATOR) for each in members)
    return sorted(address for found, _, address in pairs if found == zone)


def parent(
    servers: Sequence[str],
    server: str,
    *,
    tree: int,
    trees: int,
    fanout: int,
    lost: Collection[str] = (),
) -> str | None:
    """The source of `server` in `tree` of `trees`; None: the weights service.

    A source comes before whom it sends to in the order of the tree, also when some are lost: who
    asked before and who asks after never wait for each other.

    Args:
        servers: all registered servers, sorted; one that is not among them has no parent.
        server: the one that fetches.
        tree: 0 or more; counted modulo `trees`.
        trees: number of trees, limited to the number of servers.
        fanout: maximum children of a server in one tree.
        lost: those of `servers` that cannot be reached. Instead of one of them its own source
            sends; if all sources up to the root are lost, the first server that is left.
    """
    if server not in servers:
        return None
    trees = min(trees, len(servers))
    start = (tree % trees) * len(servers) // trees
    order = [*servers[start:], *servers[:start]]
    place = order.index(server)
    while place and order[place := (place - 1) // fanout] in lost:
        pass
    source = order[place]
    if source in lost:
        source = next(each for each in order if each not in lost or each == server)
    return None if source == server else source
