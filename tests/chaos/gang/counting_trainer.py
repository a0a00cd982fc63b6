"""`python -m tests.chaos.gang.counting_trainer`: a trainer by the old rule, for the control.

It counts how many nodes have granted their device, does not look which, and asks the scheduler for
any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import grpc.aio

from trainer import cli
from trainer.clients.node_client import NodeClient
from trainer.ranks.device_lease import DeviceLease
from trainer.ranks.rank_group import RankGroup


class _AnyNodes(DeviceLease):
    def __init__(self, ranks: RankGroup, num_nodes: int, _nodes: Sequence[str]) -> None:
        super().__init__(ranks, num_nodes)


class _AnyNodeClient(NodeClient):
    def __init__(self, channel: grpc.aio.Channel | None, *gang: Any) -> None:
        super().__init__(channel, *gang[:3])


def main() -> None:
    """Run it."""
    with (
        patch.object(cli, "DeviceLease", _AnyNodes),
        patch.object(cli, "NodeClient", _AnyNodeClient),
    ):
        cli.main()


if __name__ == "__main__":
    main()
