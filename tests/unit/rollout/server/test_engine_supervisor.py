"""Dead engines that can be started again, and when they are not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollout.server.config import RolloutServerConfig
from rollout.server.engine_lifecycle import EngineLifecycle, State
from rollout.server.engine_supervisor import EngineSupervisor
from rollout.server.engines.engine import EngineFailed, EngineInfo, PauseMode
from rollout.server.engines.fake import FakeEngine
from tests.lib.rollout.server.support import collect, request, settle


class MortalEngine(FakeEngine):
    """A fake engine that fails on request and may be restarted."""

    starts = 0

    @property
    def info(self) -> EngineInfo:
        """As the fake's, with "restart"."""
        info = super().info
        return replace(info, features=info.features | {"restart"})

    async def start(self) -> None:
        """Begin again, with nothing left of the life before."""
        self.starts += 1
        self._paused, self._weight_version = None, 0
        await super().start()

    async def die(self) -> None:
        """End the task as an error would."""

        async def broken() -> None:
            raise RuntimeError("out of luck")

        step, self._step = self._step, broken
        self._wake.set()
        assert self._task is not None
        await asyncio.wait([self._task])
        self._step = step


async def serving() -> tuple[MortalEngine, EngineLifecycle]:
    """A server that takes turns."""
    engine = MortalEngine(RolloutServerConfig())
    server = EngineLifecycle(engine, None)
    await server.start()
    await server.begin()
    return engine, server


async def test_restarted_engine_serves_only_after_begin() -> None:
    """Turns are held from the restart until the newest weights are in."""
    engine, server = await serving()
    current = asyncio.Event()

    async def begin() -> None:
        await current.wait()
        await server.begin()

    def reloading() -> bool:
        return engine.starts >= 2 and server.state is State.LOADING

    supervisor = asyncio.create_task(EngineSupervisor(server, begin).run())
    await engine.die()
    while not reloading():
        await asyncio.sleep(0)
    turn = asyncio.create_task(collect(engine.generate(request())))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not turn.done()
    current.set()
    assert len((await turn).token_ids) == 32
    assert server.state is State.SERVING
    supervisor.cancel()
    await engine.close()


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
async def test_a_pause_outlasts_a_restart(mode: PauseMode) -> None:
    """Who asked for it asks for its end: a new engine does not take turns before."""
    engine, server = await serving()
    await server.pause(mode)
    supervisor = asyncio.create_task(EngineSupervisor(server, server.begin).run())
    await engine.die()
    while engine.starts < 2 or server.state is State.LOADING:
        await asyncio.sleep(0)
    assert server.state is State.PAUSED
    turn = asyncio.create_task(collect(engine.generate(request())))
    await settle()
    given_up = mode is PauseMode.ABORT
    assert turn.done() == given_up
    await server.resume()
    assert len((await turn).token_ids) == (0 if given_up else 32)
    supervisor.cancel()
    await engine.close()


async def test_what_goes_wrong_at_a_restart_is_not_lost() -> None:
    """An error that no new engine can mend ends the process instead of a silent wait."""
    engine, server = await serving()

    async def begin() -> None:
        raise OSError(28, "No space left on device")

    supervisor = asyncio.create_task(EngineSupervisor(server, begin).run())
    await engine.die()
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(supervisor, 10)
    assert raised.group_contains(OSError, match="No space left")
    await engine.close()


async def test_engine_that_keeps_dying_ends_the_process() -> None:
    """Five deaths in a row as soon as it serves are enough; one that lived longer starts anew."""
    engine, server = await serving()
    now = 0.0
    supervisor = asyncio.create_task(EngineSupervisor(server, server.begin, lambda: now).run())
    for death, lived in enumerate([1.0, 1.0, 100.0, 1.0, 1.0, 1.0, 1.0, 1.0], 1):
        await asyncio.sleep(0)
        now += lived
        await engine.die()
        while engine.starts == death and not supervisor.done():
            await asyncio.sleep(0)
    with pytest.raises(EngineFailed, match="out of luck"):
        await supervisor
    assert engine.starts == 8
    await engine.close()


async def test_engine_is_not_started_where_its_memory_is_lent() -> None:
    """Released memory may be in use elsewhere: a failed engine ends the process instead."""
    engine, server = await serving()
    supervisor = asyncio.create_task(EngineSupervisor(server, server.begin).run())
    await server.release()
    await engine.die()
    with pytest.raises(EngineFailed):
        await supervisor
    assert engine.starts == 1
    await engine.close()


async def test_update_pause_in_place_needs_an_engine_that_can() -> None:
    """A configuration that the engine cannot keep is refused at the start, and by name later."""

    class Plain(FakeEngine):
        @property
        def info(self) -> EngineInfo:
            return replace(super().info, features=frozenset())

    engine = Plain(RolloutServerConfig())
    with pytest.raises(ValueError, match="update_pause is in_place: the fake engine cannot"):
        await EngineLifecycle(engine, None, update_pause=PauseMode.IN_PLACE).start()
    server = EngineLifecycle(engine, None)
    await server.start()
    await server.begin()
    with pytest.raises(Exception, match="cannot pause in place: use RETRACT"):
        await server.pause(PauseMode.IN_PLACE)
    await engine.close()
