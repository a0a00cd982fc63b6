"""The state machine: random histories of a run, on Redis and in memory at once.

After each rule everything a caller can see is compared. Answers get lost and calls are sent again,
managers die between two steps on the store, and Redis is killed and started on its data.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from services.chassis.errors import ServiceError
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.memory.token_store import MemoryTokenStore
from tests.suites.state_machine.agents import WORK
from tests.suites.state_machine.base import RUN_ID, Rig
from tests.suites.state_machine.clock import scripts_on_the_clock
from tests.suites.state_machine.own_leases import OwnLeases
from tests.suites.state_machine.retention import Keepers
from tests.suites.state_machine.trainer import PROGRESS, Consumers, Trainer

_TRIES = 100


class Machine(OwnLeases, Keepers, Trainer, Consumers):
    """All rules, and a store that crashes."""

    only: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def setup_state(cls) -> Any:
        """The rules of this machine: `only` some, if it names any."""
        state = super().setup_state()
        state.rules[:] = [r for r in state.rules if not cls.only or r.function.__name__ in cls.only]
        return state

    # Drawn as often as they are here: what brings a history forward, among all that disturbs it.

    @rule(**WORK)
    def work_on(self, **given: Any) -> None:
        """See `work`."""
        self.work(**given)

    @rule(**WORK)
    def work_more(self, **given: Any) -> None:
        """See `work`."""
        self.work(**given)

    @rule(**PROGRESS)
    def progress_on(self, **given: Any) -> None:
        """See `progress`."""
        self.progress(**given)

    @rule(**PROGRESS)
    def progress_more(self, **given: Any) -> None:
        """See `progress`."""
        self.progress(**given)

    @precondition(lambda self: self.rig.restarts)
    @rule()
    def kill_redis(self) -> None:
        """Redis ends by SIGKILL and starts again: what was acknowledged is there."""
        self.rig.server.kill()
        self.rig.server.start("always")
        self.wait(self._reconnect())
        model = self.pair.model.store.tokens
        assert isinstance(model, MemoryTokenStore)
        model.restart()
        self.rig.counts["store_restarts"] += 1

    async def _reconnect(self) -> None:
        """Connections of before the crash are found broken one by one."""
        for _ in range(_TRIES):
            try:
                await self.pair.real.store.runs.run_counts(RUN_ID)
                await self.pair.real.store.runs.listed(RUN_ID, 0, 1)
                await self.pair.clock.publish(self.pair.redis)
            except (ServiceError, ConnectionError):
                continue
            return
        raise AssertionError("Redis does not answer after its restart")


class Writers(Machine):
    """Few rollouts and many who write them."""

    only = frozenset({"start_unleased", "begin", "reopen", "append", "finish", "kill_redis"})


class Rewriters(Machine):
    """The same without finishing rollouts: most operations are appends."""

    only = frozenset({"start_unleased", "begin", "reopen", "append"})


class Trainers(Machine):
    """Many groups and many who train on them."""

    only = frozenset(
        {"work", "work_on", "work_more", "progress", "progress_on", "progress_more", "train"}
        | {"commit", "replace_trainer", "ask", "requeue", "record", "settle", "sweep"}
        | {
            "lease_column",
            "write_column",
            "return_cells",
            "fail_cells",
            "compute_columns",
            "retain",
            "kill_redis",
        }
    )


MACHINES = (Machine, Writers, Trainers)


@contextmanager
def rig(
    folder: Path, *, restarts: bool, broken: Mapping[str, tuple[str, str]] = {}
) -> Iterator[Rig]:
    """A dedicated server in `folder`; `broken` scripts as in `scripts_on_the_clock`."""
    server = RedisServer(folder / "redis")
    server.start("always" if restarts else "everysec")
    loop = asyncio.new_event_loop()
    try:
        scripts = scripts_on_the_clock(folder / "lua", broken)
        yield Rig(server, scripts, restarts, loop)
    finally:
        loop.close()
        server.stop()


def explore(
    on: Rig,
    kind: type[Machine],
    *,
    histories: int,
    rules: int,
    first_seed: int,
    shrink: bool = True,
) -> Counter[str]:
    """Run random histories of up to so many rules each; what was counted.

    Raises:
        AssertionError: the stores disagree; its notes are the shortest such history found.
    """
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]

    @seed(first_seed)
    def machine() -> Any:
        return kind(on)

    run_state_machine_as_test(
        cast(Any, machine),
        settings=settings(
            max_examples=histories,
            stateful_step_count=rules,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return on.counts
