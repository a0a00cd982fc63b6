"""Who fetches which file from whom, so that the weights service sends each file about once.

Several broadcast trees over the same servers (StreamRL, arXiv 2504.15930, section 5): tree `t` is a
heap whose order is the sorted servers, rotated, so that each tree has another root and other inner
nodes. File `i` of a version travels down tree `i mod trees`: all uplinks share the work. Nothing is
agreed upon: whoever knows the live servers computes the same trees, and a server that joins or goes
only moves a few edges of the next version.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["parent"]


def parent(
    servers: Sequence[str], server: str, *, tree: int, trees: int, fanout: int
) -> str | None:
    """From whom `server` fetches in `tree` of `trees`; None: from the weights service.

    Args:
        servers: all live ones, sorted; one that is not among them is nobody's child.
        server: who asks.
        tree: 0 or more; counted modulo `trees`.
        trees: how many there are; more than servers are as many as servers.
        fanout: most children of a server in one tree.
    """
    if server not in servers:
        return None
    trees = min(trees, len(servers))
    start = (tree % trees) * len(servers) // trees
    position = (servers.index(server) - start) % len(servers)
    if position == 0:
        return None
    return servers[(start + (position - 1) // fanout) % len(servers)]
