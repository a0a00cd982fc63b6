"""What holds for every stepped environment. Each check raises `AssertionError` if it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentClient, OpenEpisode, Step, Task
from seamflow.errors import SeamflowError

from tests.lib.environments.contract.case import Case, Server, serving
from tests.lib.environments.support import World, working, world
from tests.lib.redis_server import free_port

Check = Callable[[Case, EnvironmentClient], Awaitable[None]]

_RESET_SECONDS = 60.0


async def repeats_by_seed(case: Case, client: EnvironmentClient) -> None:
    """Equal seeds give equal episodes; other seeds give others, where chance plays a part."""
    assert (await client.describe()).is_seeded, "it is not declared as seeded"
    first, again = [await transcript(case, client, 1) for _ in range(2)]
    assert first == again, f"seed 1 gave {first} and then {again}"
    if case.is_random:
        others = [await transcript(case, client, seed) for seed in range(2, 6)]
        assert any(each != first for each in others), f"all seeds give {first}"


async def keeps_episodes_apart(case: Case, client: EnvironmentClient) -> None:
    """Two interleaved episodes are what each is alone."""
    alone = [await transcript(case, client, seed) for seed in (1, 2)]
    task = await a_task(case, client)
    async with (
        await client.reset(task, 1) as one,
        await client.reset(task, 2) as two,
    ):
        episodes = [Played(case, one), Played(case, two)]
        while any([await each.step() for each in episodes]):
            pass
        mixed = [each.said for each in episodes]
        assert mixed == alone, f"interleaved episodes gave {mixed}, alone {alone}"


async def answers_bad_actions(case: Case, client: EnvironmentClient) -> None:
    """What is no action is answered or ends the episode; it is no failure and earns nothing."""
    task = await a_task(case, client)
    for text in case.bad_answers:
        async with await client.reset(task, 1) as episode:
            total = 0.0
            for _ in range(case.max_steps):
                step = await answered(episode, {"role": "assistant", "content": text})
                total += sum(named(step).values())
                if step.done or step.truncated:
                    break
            assert total <= 0, f"{text[:40]!r} earned {total}"


async def answers_bad_tool_calls(case: Case, client: EnvironmentClient) -> None:
    """An unknown tool, and arguments that are no JSON: answered under the call's id."""
    task = await a_task(case, client)
    for name, arguments in (("no_such_tool", "{}"), ("act", "{"), ("act", "[]")):
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        async with await client.reset(task, 1) as episode:
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            step = await answered(episode, said)
            assert sum(named(step).values()) <= 0, f"the call {call} earned {named(step)}"


async def answered(episode: OpenEpisode, message: dict[str, Any]) -> Step:
    """The answer to a message that is no action."""
    try:
        return await episode.step(message)
    except SeamflowError as error:
        raise AssertionError(f"{str(message)[:80]} failed: {error}") from error


async def waits_for_room(case: Case, client: EnvironmentClient) -> None:
    """`client` is that of a server of one episode: the second starts when the first ends."""
    task = await a_task(case, client)
    first = await client.reset(task, 1)
    waiting = asyncio.create_task(client.reset(task, 2, timeout=_RESET_SECONDS))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done, f"the second reset did not wait: {waiting.exception()}"
    await first.close()
    async with await waiting as second:
        assert second.observation.messages


async def replaces_a_dead_server(case: Case, folder: Path) -> None:
    """SIGKILL between a turn and its step: a failure without reward, then a rollout with one."""
    async with AsyncServer(case) as server, world(folder) as run:
        run.always_say(case.answers[0])
        run.server.may_answer.clear()
        task = await a_task(case, server.client)
        await run.submit(json.dumps(dict(task.payload)))
        async with working(run, server.address, max_turns=case.max_steps):
            await _asked(run)
            await server.restart()
            run.server.may_answer.set()
            (first,) = await run.ended(1)
            assert not first.HasField("rewards"), "a dead environment gave a reward"
            _, second = await run.ended(2)
    assert first.failure.failure_class == tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
    assert second.HasField("rewards"), second.failure.message


async def _asked(run: World) -> None:
    async with asyncio.timeout(30):
        await run.server.asked.wait()


class AsyncServer:
    """A server of a case that can be killed and started again on its port."""

    def __init__(self, case: Case, **flags: object) -> None:
        self._case, self._flags = case, flags
        self._port = free_port()
        self._serving: Any = None
        self._process: Server | None = None
        self.address = f"127.0.0.1:{self._port}"
        """host:port."""
        self.client: EnvironmentClient
        """Connected to it."""

    async def __aenter__(self) -> AsyncServer:
        await self._start()
        self.client = EnvironmentClient(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await asyncio.to_thread(self._serving.__exit__, None, None, None)

    async def restart(self) -> None:
        """SIGKILL, then a new process."""
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._serving.__exit__, None, None, None)
        await self._start()

    async def _start(self) -> None:
        self._serving = serving(self._case, self._port, **self._flags)
        _, self._process = await asyncio.to_thread(self._serving.__enter__)


class Played:
    """An episode played by the scripted policy, with all that was said."""

    def __init__(self, case: Case, episode: OpenEpisode) -> None:
        self._case, self._episode, self._num_steps = case, episode, 0
        start = episode.observation
        self.said = [json.dumps([start.messages, start.tools, dict(start.info)], sort_keys=True)]
        """The start and each step, as JSON."""
        self._has_ended = False

    async def step(self) -> bool:
        """Play one step; whether the episode goes on."""
        if self._has_ended or self._num_steps == self._case.max_steps:
            return False
        text = self._case.answers[self._num_steps % len(self._case.answers)]
        step = await self._episode.step({"role": "assistant", "content": text})
        self._num_steps += 1
        ends = [step.done, step.truncated, step.policy_failure]
        given = [list(step.messages), named(step), ends, dict(step.info)]
        self.said.append(json.dumps(given, sort_keys=True))
        self._has_ended = step.done or step.truncated
        return not self._has_ended


async def transcript(case: Case, client: EnvironmentClient, seed: int) -> list[str]:
    """All that is said in an episode."""
    async with await client.reset(await a_task(case, client), seed) as episode:
        played = Played(case, episode)
        while await played.step():
            pass
        return played.said


async def a_task(case: Case, client: EnvironmentClient) -> Task:
    """The environment's first task, or one with the payload of the case."""
    async for task in client.tasks():
        return task
    return Task(task_id="t", payload=case.payload)


def contents(step: Step) -> list[str]:
    """The texts of its messages."""
    return [str(message["content"]) for message in step.messages if not isinstance(message, str)]


def named(step: Step) -> dict[str, float]:
    """Its rewards by name."""
    assert isinstance(step.rewards, dict)
    return step.rewards


@asynccontextmanager
async def connected(case: Case, **flags: object) -> AsyncIterator[EnvironmentClient]:
    """A client of a server process."""
    async with AsyncServer(case, **flags) as server:
        yield server.client
