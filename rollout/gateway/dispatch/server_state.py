"""State of one rollout server in a gateway."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.gateway.dispatch.policies import Candidate

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub


@dataclass(slots=True)
class Standing:
    """What a gateway has seen of one server's turns."""

    failures: float = 0.0
    """Failed turns, less what good ones since make up for."""
    cause: str = ""
    ejected_until: float | None = None
    """Seconds of the clock; None: in use."""
    num_ejections: int = 0
    """Ejections with hardly any time between them; each lasts twice as long."""
    num_probes: int = 0
    restored: float = 0.0
    num_empty: int = 0
    """Empty answers in a row."""
    num_answers: int = 0
    num_not_empty: int = 0
    """Of these, with more than what ends an answer, since it was ejected."""


@dataclass(slots=True)
class Server:
    """A server's address, last report and number of turns."""

    address: str
    channel: grpc.aio.Channel
    """Open while the server is in the pool."""
    stub: RolloutServerServiceAsyncStub
    info: pb.GetServerInfoResponse | None = None
    """Its last report; None: it does not answer, or a turn has failed there since."""
    num_turns: int = 0
    """Turns of this gateway there."""
    num_foreign: int = 0
    """Turns of other gateways there, from its last report."""
    polling: asyncio.Task[None] | None = field(default=None)
    standing: Standing = field(default_factory=Standing)

    @property
    def features(self) -> Collection[str]:
        """Its abilities, by its last report."""
        return self.info.features if self.info is not None else ()

    def candidate(self) -> Candidate:
        """The dispatch policy's view; only for servers with a report."""
        assert self.info is not None
        return Candidate(
            server_id=self.info.server_id,
            num_turns=self.num_turns + self.num_foreign,
            max_running=self.info.max_running,
            tokens_per_second=self.info.tokens_per_second,
        )

    def has_room(self, overcommit: float) -> bool:
        """Whether one more turn is within `overcommit` times its slots; True if unknown."""
        assert self.info is not None
        slots = self.info.max_running
        return not slots or self.num_turns + self.num_foreign < math.ceil(slots * overcommit)

    def report(self, info: pb.GetServerInfoResponse, num_turns_before: int) -> None:
        """Store a report; turns beyond ours before and after the poll are other gateways'."""
        ours = max(num_turns_before, self.num_turns)
        self.num_foreign = max(info.num_running + info.num_queued - ours, 0)
        self.info = info
