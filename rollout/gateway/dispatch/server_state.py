"""One rollout server as a gateway sees it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.gateway.dispatch.policies import Candidate

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub

__all__ = ["Server"]


@dataclass(slots=True)
class Server:
    """Its address, its last report, and the turns that are there."""

    address: str
    """host:port."""
    channel: grpc.aio.Channel
    """Open as long as the server is known."""
    stub: RolloutServerServiceAsyncStub
    """Its calls."""
    info: pb.GetServerInfoResponse | None = None
    """Its last report; None: it does not answer, or gave a turn up since."""
    num_turns: int = 0
    """Turns this gateway has there."""
    num_foreign: int = 0
    """Turns of others there, by its last report."""
    polling: asyncio.Task[None] | None = field(default=None)
    """Keeps `info` fresh."""

    def candidate(self) -> Candidate:
        """What the dispatch policy sees; only for servers with a report."""
        assert self.info is not None
        return Candidate(
            server_id=self.info.server_id,
            num_turns=self.num_turns + self.num_foreign,
            max_running=self.info.max_running,
            tokens_per_second=self.info.tokens_per_second,
        )

    def has_room(self, overcommit: float) -> bool:
        """Whether one more turn keeps within `overcommit` times its slots; unknown slots: yes."""
        assert self.info is not None
        slots = self.info.max_running
        return not slots or self.num_turns + self.num_foreign < math.ceil(slots * overcommit)

    def report(self, info: pb.GetServerInfoResponse, num_turns_before: int) -> None:
        """Take its answer; what it has beyond ours, before and after the question, is foreign."""
        ours = max(num_turns_before, self.num_turns)
        self.num_foreign = max(info.num_running + info.num_queued - ours, 0)
        self.info = info
