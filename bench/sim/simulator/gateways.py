"""The gateways of a run: each gives the turns of its rollouts to its servers, by its own rules.

One gateway plays up to 32 servers. With more nodes there are several, as a large deployment would
have them; every rollout belongs to one of them by hash, every server to one of them in turn, so
that each has its part of the nodes of every kind.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from bench.sim.simulator.cluster import EmulatedNode
from rollout.gateway.dispatch.policies import Candidate, load_dispatch
from rollout.gateway.dispatch.waiting_turns import WaitingTurns

_SERVERS = 32


class Server:
    """A node as its gateway's dispatch sees it."""

    def __init__(self, node: EmulatedNode, with_room: dict[str, Server]) -> None:
        """`with_room`: the gateway's servers that may get one more turn; it keeps itself there."""
        self.node = node
        self._with_room = with_room
        self._num_turns = 0
        self._candidate: Candidate | None = None

    @property
    def num_turns(self) -> int:
        """Turns it has; counted by the waiting turns."""
        return self._num_turns

    @num_turns.setter
    def num_turns(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._candidate = None
        self.update()

    def update(self) -> None:
        """Say whether it may get one more turn."""
        if self.node.serving and self._num_turns < self.node.slots:
            self._with_room[self.node.node_id] = self
        else:
            self._with_room.pop(self.node.node_id, None)

    def candidate(self) -> Candidate:
        """For the dispatch policy."""
        if self._candidate is None:
            self._candidate = Candidate(
                server_id=self.node.node_id,
                num_turns=self._num_turns,
                max_running=self.node.slots,
                tokens_per_second=0.0,
            )
        return self._candidate


class _Gateway:
    def __init__(
        self, nodes: Iterable[EmulatedNode], dispatch: str, clock: Callable[[], float]
    ) -> None:
        self._with_room: dict[str, Server] = {}
        self.servers = {node.node_id: Server(node, self._with_room) for node in nodes}
        self.turns = WaitingTurns(
            load_dispatch(dispatch),
            lambda *_: list(self._with_room.values()),
            max_waiting=1 << 30,
            clock=clock,
        )


class Gateways:
    """All of them."""

    def __init__(
        self, nodes: Iterable[EmulatedNode], dispatch: str, clock: Callable[[], float]
    ) -> None:
        """`dispatch` names the policy; `clock` tells seconds."""
        nodes = list(nodes)
        number = -(-len(nodes) // _SERVERS)
        self._gateways = [
            _Gateway(nodes[first::number], dispatch, clock) for first in range(number)
        ]
        self._of_node = {name: gateway for gateway in self._gateways for name in gateway.servers}

    def of(self, rollout: str) -> WaitingTurns:
        """The gateway that the rollout's agent talks to."""
        return self._gateways[zlib.crc32(rollout.encode()) % len(self._gateways)].turns

    def changed(self, node: EmulatedNode) -> None:
        """The node does something else now."""
        gateway = self._of_node[node.node_id]
        gateway.servers[node.node_id].update()
        gateway.turns.assign()
