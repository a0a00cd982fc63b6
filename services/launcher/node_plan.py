"""A node of a run as the setting `nodes` describes it: its tags, GPUs and rollout servers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_NODE = re.compile(
    r"(?P<node_id>[\w-]+):(?P<tags>[\w\s-]+)"
    r"(;\s*gpus\s+(?P<gpus>\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*)\s*)?"
    r"(;\s*servers\s+(?P<servers>[1-9]\d*)\s*)?"
    r"(;\s*kind\s+(?P<kind>[\w.-]+)\s*)?"
    r"(;\s*host\s+(?P<host>\d+)\s*)?"
    r"(;\s*zone\s+(?P<zone>[\w.-]{1,64})\s*)?"
)
_KNOWN_TAGS = {"rollout", "train", "score", "reward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node to start."""

    node_id: str
    tags: tuple[str, ...]
    """Capability tags: one or more of "rollout", "train", "score" and "reward"."""
    gpus: tuple[int, ...] = ()
    """Numbers of its GPUs, as nvidia-smi counts them; none: it computes on the CPU."""
    servers: int = 1
    """Its rollout servers, which share the GPUs evenly."""
    kind: str = ""
    """Kind of its devices, of those that node agents know; empty: nvidia-smi names it."""
    host: int = 0
    """Place of its host in the list of the run's hosts."""
    zone: str = ""
    """Place of its rollout servers, such as a datacentre: about one copy of weights enters it."""

    @property
    def lends(self) -> bool:
        """Whether its rollout servers' devices do other work too."""
        return bool(set(self.tags) - {"rollout"})

    def text(self, *tags: str) -> str:
        """The setting for a node with its GPUs and servers, and these tags."""
        gpus = f"; gpus {', '.join(map(str, self.gpus))}" if self.gpus else ""
        servers = f"; servers {self.servers}" if self.servers > 1 else ""
        kind = f"; kind {self.kind}" if self.kind else ""
        host = f"; host {self.host}" if self.host else ""
        zone = f"; zone {self.zone}" if self.zone else ""
        return f"{self.node_id}: {' '.join(tags)}{gpus}{servers}{kind}{host}{zone}"

    def server_ids(self) -> list[str]:
        """Ids of its rollout servers; the only one has the node's."""
        if "rollout" not in self.tags:
            return []
        if self.servers == 1:
            return [self.node_id]
        return [f"{self.node_id}.{index}" for index in range(self.servers)]

    def server_gpus(self, index: int) -> tuple[int, ...]:
        each = len(self.gpus) // self.servers
        return self.gpus[index * each : (index + 1) * each]


def node_plan(text: str) -> NodePlan:
    """Read "name: tags; gpus 0-3, 6; servers 2; kind h20-96; host 1; zone west".

    Raises:
        ValueError: it is of another form, or the servers cannot share the GPUs.
    """
    match = _NODE.fullmatch(text.strip())
    tags = tuple(match["tags"].split()) if match else ()
    if match is None or not tags or not set(tags) <= _KNOWN_TAGS:
        raise ValueError(
            f"nodes holds {text!r}: write 'name: tags' with tags of {sorted(_KNOWN_TAGS)}, and on "
            "a machine with GPUs 'name: tags; gpus 0-3', or '; gpus 0-7; servers 8' for several "
            "rollout servers; then, in this order, '; kind h20-96' for devices that nvidia-smi "
            "does not name, '; host 1' for the second of several hosts, '; zone west'"
        )
    gpus, servers = tuple(_numbers(match["gpus"] or "")), int(match["servers"] or 1)
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"nodes holds {text!r}: a GPU is named twice; name each once")
    if servers > 1 and "rollout" not in tags:
        raise ValueError(f"nodes holds {text!r}: servers are for the tag 'rollout'; take them out")
    if gpus and len(gpus) % servers:
        raise ValueError(
            f"nodes holds {text!r}: {servers} servers cannot share {len(gpus)} GPUs evenly; give "
            f"servers that divide {len(gpus)}"
        )
    return NodePlan(
        node_id=match["node_id"],
        tags=tags,
        gpus=gpus,
        servers=servers,
        kind=match["kind"] or "",
        host=int(match["host"] or 0),
        zone=match["zone"] or "",
    )


def _numbers(text: str) -> Iterator[int]:
    """Read "0-3, 6"."""
    for part in filter(None, map(str.strip, text.split(","))):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def check_gpus(nodes: Sequence[NodePlan], trainer_ranks: int) -> None:
    """Check that no GPU is two nodes', and that each rank of the trainer has its own.

    Args:
        nodes: of all hosts, each of which counts its GPUs from 0.
        trainer_ranks: on each node that trains; 0: one for each of its GPUs.

    Raises:
        ValueError: it names nodes, GPUs and cure.
    """
    owners: dict[tuple[int, int], str] = {}
    for node in nodes:
        for gpu in node.gpus:
            if (owner := owners.setdefault((node.host, gpu), node.node_id)) != node.node_id:
                raise ValueError(
                    f"nodes: {owner!r} and {node.node_id!r} both have GPU {gpu}; give each "
                    "node its own, or both tags to one node, which then does one at a time"
                )
    for node in nodes if owners else ():
        if "train" in node.tags and trainer_ranks > len(node.gpus):
            raise ValueError(
                f"trainer_ranks is {trainer_ranks} and node {node.node_id!r} has "
                f"{len(node.gpus)} GPUs: each rank needs its own; give it more, or fewer ranks"
            )


def check_hosts_of_nodes(nodes: Sequence[NodePlan], hosts: Sequence[str]) -> None:
    """Check that each node is on a host of the run, and that each host has a node.

    Raises:
        ValueError: it names node, host and cure.
    """
    number = max(1, len(hosts))
    for node in nodes:
        if node.host >= number:
            raise ValueError(
                f"nodes: {node.node_id!r} is on host {node.host}, and hosts has {len(hosts)}, "
                "counted from 0: add the address of that host to hosts"
            )
    used = {0, *(node.host for node in nodes)}
    if idle := [host for number, host in enumerate(hosts) if number not in used]:
        raise ValueError(
            f"hosts: {idle[0]!r} has no node: give one '; host {hosts.index(idle[0])}', or take "
            "the host out"
        )
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"hosts is {list(hosts)}: one is named twice; name each once")


def ranks_of(nodes: Sequence[NodePlan], trainer_ranks: int) -> int:
    """Ranks on each node that trains: those given, else one for each of its GPUs, else one.

    Raises:
        ValueError: the nodes have different numbers of GPUs, and no number of ranks is given.
    """
    numbers = {len(node.gpus) for node in nodes if "train" in node.tags}
    if trainer_ranks or not numbers:
        return trainer_ranks or 1
    if len(numbers) > 1:
        raise ValueError(
            f"nodes: those that train have {', '.join(map(str, sorted(numbers)))} GPUs; give them "
            "equally many, or set trainer_ranks"
        )
    return max(1, *numbers)
