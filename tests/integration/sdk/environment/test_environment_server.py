"""Environment classes over real gRPC: isolation, idempotence, capacity, errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from seamflow.credentials import Credentials
from seamflow.environment import (
    Endpoint,
    EnvironmentClient,
    EnvironmentServerConfig,
    Task,
    Transcript,
    serving,
)
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.environment.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from seamflow.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    SeamflowError,
    decode,
)
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.sdk.environment.environments import (
    AsyncEcho,
    Blocks,
    Drives,
    Fails,
    FullAtFirst,
    Guess,
    long_answer,
    named,
)

TASK = Task(task_id="t", payload={"highest": 9})


def said(text: str) -> dict[str, str]:
    """A message of the policy."""
    return {"role": "assistant", "content": text}


@asynccontextmanager
async def served(environment: Any, **settings: Any) -> AsyncIterator[EnvironmentClient]:
    """A client of a server of this class."""
    config = EnvironmentServerConfig(**settings)
    async with (
        serving(environment, config) as port,
        EnvironmentClient(f"127.0.0.1:{port}") as client,
    ):
        yield client


@asynccontextmanager
async def raw(environment: Any, **settings: Any) -> AsyncIterator[Any]:
    """The bare stub of a server of this class."""
    config = EnvironmentServerConfig(**settings)
    async with (
        serving(environment, config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield async_stub(EnvironmentServiceStub, channel)


def resetting(name: str, seed: int = 0, payload: str = '{"highest": 9}') -> pb.ResetRequest:
    """A request."""
    task = trajectory_pb2.Task(task_id="t", payload_json=payload)
    return pb.ResetRequest(episode_id=name, task=task, seed=seed)


def stepping(name: str, index: int, text: str) -> pb.StepRequest:
    """A request."""
    part = rollout_pb.ContentPart(type="text", text=text)
    message = rollout_pb.Message(role="assistant", content=[part])
    return pb.StepRequest(episode_id=name, step_index=index, message=message)


async def failure(call: Any) -> SeamflowError:
    """What a call of the bare stub fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return decode(failed.value)


async def solved(client: EnvironmentClient, seed: int) -> int:
    """The number of a seed, found by asking."""
    for number in range(1, 10):
        async with await client.reset(TASK, seed) as episode:
            if (await episode.step(said(str(number)))).done:
                return number
    raise AssertionError("no number is right")


async def test_a_class_is_described_and_lists_its_tasks() -> None:
    """Kind, tools, tasks, capacity, seeds."""
    async with served(Guess) as client:
        found = await client.describe()
        tasks = [task async for task in client.tasks()]
    assert (found.name, found.kind) == ("Guess", pb.ENVIRONMENT_KIND_STEPPED)
    assert (found.num_tasks, found.max_episodes, found.is_seeded) == (3, 4, True)
    assert [tool.name for tool in found.tools] == ["add"]
    assert [(task.task_id, task.payload["highest"]) for task in tasks] == [
        ("0", 9),
        ("1", 99),
        ("2", 999),
    ]


async def test_tasks_come_in_pages() -> None:
    """Every task once, also where a page holds two."""
    async with raw(Guess) as stub:
        first = await stub.ListTasks(pb.ListTasksRequest(page_size=2))
        token = first.next_page_token
        second = await stub.ListTasks(pb.ListTasksRequest(page_size=2, page_token=token))
    assert [len(page.tasks) for page in (first, second)] == [2, 1]
    assert second.next_page_token == ""


async def test_an_episode_from_reset_to_its_end() -> None:
    """Messages, tools, named rewards, done."""
    async with served(Guess) as client:
        number = await solved(client, seed=7)
        async with await client.reset(TASK, seed=7) as episode:
            assert episode.observation.messages[0]["content"] == "Guess a number from 1 to 9."
            tools = episode.observation.tools or ()
            assert [tool["function"]["name"] for tool in tools] == ["add"]
            wrong = await episode.step(said("0"))
            right = await episode.step(said(str(number)))
    assert (wrong.messages[0], wrong.done) == ({"role": "user", "content": "higher"}, False)
    assert wrong.info == {"guesses": ["0"]}
    assert (right.rewards, right.done) == ({"reward": 1.0, "speed": 0.5}, True)


async def test_reset_is_repeatable_by_seed() -> None:
    """Equal seeds give equal numbers, and not all seeds the same."""
    async with served(Guess) as client:
        numbers = [await solved(client, seed) for seed in (1, 2, 3, 1, 2, 3)]
    assert numbers[:3] == numbers[3:]
    assert len(set(numbers)) > 1


async def test_two_episodes_do_not_mix() -> None:
    """Each keeps its own guesses, step by step in turn."""
    async with (
        served(Guess) as client,
        await client.reset(TASK, 1) as one,
        await client.reset(TASK, 1) as two,
    ):
        await one.step(said("0"))
        answers = await asyncio.gather(one.step(said("10")), two.step(said("0")))
    assert [answer.info["guesses"] for answer in answers] == [["0", "10"], ["0"]]


async def test_truncation_and_failures_of_the_policy_are_passed_on() -> None:
    """Both end an episode that counts."""
    async with served(Guess) as client:
        async with await client.reset(TASK) as episode:
            steps = [await episode.step(said("0")) for _ in range(3)]
        async with await client.reset(TASK) as episode:
            end = await episode.step(said("give up"))
    assert [step.truncated for step in steps] == [False, False, True]
    assert (end.done, end.policy_failure) == (True, "gave up")


async def test_async_environments_answer_tool_calls_and_are_closed() -> None:
    """Ids and arguments arrive as sent."""
    AsyncEcho.closed.clear()
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"i":{i}}}'}}
        for i in range(2)
    ]
    task = Task(task_id="mine", payload={})
    async with served(AsyncEcho) as client, await client.reset(task) as episode:
        step = await episode.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert [message["role"] for message in episode.observation.messages] == ["system", "user"]
    assert not isinstance(step.messages, str)
    assert [(m["tool_call_id"], m["content"]) for m in step.messages] == [
        ("c0", '{"i":0}'),
        ("c1", '{"i":1}'),
    ]
    assert step.rewards == {"reward": 0.5}
    assert AsyncEcho.closed == ["mine"]


async def test_repeated_calls_get_the_first_answer() -> None:
    """A repeated step is not made again; other content under its index is refused."""
    async with raw(Guess) as stub:
        assert await stub.Reset(resetting("e")) == await stub.Reset(resetting("e"))
        first = await stub.Step(stepping("e", 0, "0"))
        assert await stub.Step(stepping("e", 0, "0")) == first
        assert '["0"]' in first.info_json
        other = await failure(stub.Step(stepping("e", 0, "1")))
        reset = await failure(stub.Reset(resetting("e", seed=1)))
        assert (type(other), type(reset)) == (ConflictError, ConflictError)
        early = await failure(stub.Step(stepping("e", 2, "0")))
        assert (type(early), early.reason) == (PreconditionError, "STEP_OUT_OF_ORDER")
        assert "the next is 1" in str(early)


async def test_an_ended_or_closed_episode_takes_no_step() -> None:
    """WRONG_STATE after the end, NOT_FOUND after Close, which may be repeated."""
    async with raw(Guess) as stub:
        await stub.Reset(resetting("e"))
        await stub.Step(stepping("e", 0, "give up"))
        assert (await failure(stub.Step(stepping("e", 1, "0")))).reason == "WRONG_STATE"
        for _ in range(2):
            await stub.Close(pb.CloseRequest(episode_id="e"))
        gone = await failure(stub.Step(stepping("e", 1, "0")))
    assert isinstance(gone, NotFoundError)
    assert gone.metadata == {"what": "episode", "name": "e"}


async def test_beyond_capacity_the_caller_waits() -> None:
    """The status names a time; a closed episode makes room."""
    async with raw(Guess, max_episodes=1) as stub:
        await stub.Reset(resetting("one"))
        full = await failure(stub.Reset(resetting("two")))
        assert isinstance(full, ExhaustedError)
        assert full.retry_after
        await stub.Close(pb.CloseRequest(episode_id="one"))
        await stub.Reset(resetting("two"))


async def test_the_client_waits_for_room() -> None:
    """An environment without room is asked again."""
    FullAtFirst.num_resets = 0
    async with served(FullAtFirst) as client, await client.reset(TASK) as episode:
        assert (await episode.step(said("x"))).done
    assert FullAtFirst.num_resets == 2


async def test_idle_episodes_make_room() -> None:
    """Of a caller that died; with a long idle_seconds they do not (negative control)."""
    async with raw(Guess, max_episodes=1, idle_seconds=1e-6) as stub:
        await stub.Reset(resetting("one"))
        await stub.Reset(resetting("two"))
        assert isinstance(await failure(stub.Step(stepping("one", 0, "0"))), NotFoundError)
    async with raw(Guess, max_episodes=1) as stub:
        await stub.Reset(resetting("one"))
        assert isinstance(await failure(stub.Reset(resetting("two"))), ExhaustedError)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"reset": "raise"}, ("reset of task 't'", "no disk")),
        ({"reset": "number"}, ("reset returned 7", "return a text")),
        ({"reset": "nothing"}, ("reset returned no message", "at least one")),
        ({"reset": "roleless"}, ("messages[0]", '"role"')),
        ({"step": "raise"}, ("step 0 of task 't'", "no disk")),
        ({"step": "nan"}, ("nan as reward 'reward'", "finite")),
        ({"step": "text"}, ("step returned 'well'", "Step")),
        ({"step": "silent"}, ("step returned no message", "done=True")),
        ({"step": "stop"}, ("step 0 of task 't'", "StopIteration")),
    ],
)
async def test_failures_of_the_users_code_name_task_and_cure(
    payload: dict[str, str], words: tuple[str, str]
) -> None:
    """They are of class ENVIRONMENT."""
    async with served(Fails) as client:
        with pytest.raises(PreconditionError) as failed:
            async with await client.reset(Task(task_id="t", payload=payload)) as episode:
                await episode.step(said("x"))
    error = failed.value
    assert (error.reason, error.metadata) == (
        "ENVIRONMENT_FAILED",
        {"failure_class": "ENVIRONMENT"},
    )
    assert all(word in str(error) for word in words)


async def test_an_environment_may_name_the_failure_class() -> None:
    """Such as that of a sandbox whose host is gone."""
    async with served(Fails) as client:
        task = Task(task_id="t", payload={"step": "infrastructure"})
        async with await client.reset(task) as episode:
            with pytest.raises(PreconditionError) as failed:
                await episode.step(said("x"))
    assert failed.value.metadata == {"failure_class": "INFRASTRUCTURE"}


async def test_a_blocked_step_holds_neither_other_episodes_nor_its_place() -> None:
    """It runs in a thread of its own; closing it frees the place."""
    Blocks.may_go_on = threading.Event()
    async with served(Blocks, max_episodes=2) as client:
        async with await client.reset(TASK) as blocked:
            with pytest.raises(DeadlineError):
                await blocked.step(said("block"), timeout=0.2)
            async with await client.reset(TASK) as other:
                assert (await other.step(said("x"))).done
        async with await client.reset(TASK), await client.reset(TASK):
            pass
        Blocks.may_go_on.set()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (resetting(""), "episode_id"),
        (resetting("e", seed=-1), "seed"),
        (resetting("e", payload="[1]"), "task.payload_json"),
        (resetting("e", payload="{"), "task.payload_json"),
        (pb.StepRequest(episode_id="e"), "message.role"),
        (pb.ListTasksRequest(page_size=1001), "page_size"),
        (pb.ListTasksRequest(page_token="x"), "page_token"),
    ],
)
async def test_wrong_requests_are_refused_by_field(request_: Any, field: str) -> None:
    """The error names it."""
    async with raw(Guess) as stub:
        rpc = type(request_).__name__.removesuffix("Request")
        error = await failure(getattr(stub, rpc)(request_))
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.violations] == [field]


async def test_the_token_is_required() -> None:
    """Wrong or missing: UNAUTHENTICATED; the right one is served."""
    config = EnvironmentServerConfig(token="right")
    async with serving(Guess, config) as port:
        for token in (None, "wrong", "right"):
            credentials = Credentials(token=token)
            async with EnvironmentClient(f"127.0.0.1:{port}", credentials=credentials) as client:
                if token == "right":
                    assert (await client.describe()).name == "Guess"
                    continue
                with pytest.raises(PermissionDeniedError):
                    await client.describe()


ENDPOINT = Endpoint(
    base_url="http://h/v1",
    anthropic_base_url="http://h",
    rollout_gateway="g:1",
    run_id="run",
    rollout_id="r",
    credential="secret",
)


async def test_a_self_driving_environment_returns_its_rewards() -> None:
    """It gets the endpoint, whose credential is not shown."""
    async with served(Drives) as client:
        found = await client.describe()
        rewards = await client.run_episode(TASK, ENDPOINT, seed=3)
        with pytest.raises(PreconditionError) as failed:
            await client.run_episode(Task(task_id="t", payload={"fail": 1}), ENDPOINT)
        with pytest.raises(PreconditionError) as unserved:
            await client.reset(TASK)
    assert found.kind == pb.ENVIRONMENT_KIND_SELF_DRIVING
    assert [(reward.name, reward.value) for reward in rewards.rewards] == [("reward", 3.0)]
    assert failed.value.metadata == {"failure_class": "ENVIRONMENT"}
    assert (unserved.value.reason, "call RunEpisode" in str(unserved.value)) == (
        "UNSUPPORTED",
        True,
    )
    assert "secret" not in repr(ENDPOINT)


async def test_a_reward_function_scores_a_batch() -> None:
    """One failure leaves the others scored."""
    transcripts = [
        Transcript(
            rollout_id=f"r{i}",
            task=Task(task_id=f"t{i}", payload={"fail": i == 1}),
            messages=[{"role": "user", "content": "?"}, said("x" * i)],
        )
        for i in range(3)
    ]
    async with (
        serving(reward=long_answer) as port,
        EnvironmentClient(f"127.0.0.1:{port}") as client,
    ):
        first, failed, third = await client.score(transcripts)
    assert (first, third) == ({"reward": 0.0}, {"reward": 2.0})
    assert isinstance(failed, PreconditionError)
    assert failed.metadata == {"failure_class": "ENVIRONMENT"}
    assert "'r1'" in str(failed)
    assert "'t1'" in str(failed)


async def test_an_async_reward_function_names_its_rewards() -> None:
    """An empty batch is refused."""
    async with serving(reward=named) as port, EnvironmentClient(f"127.0.0.1:{port}") as client:
        transcript = Transcript(rollout_id="r", task=TASK, messages=[said("x")])
        assert await client.score([transcript]) == [{"reward": 1.0, "style": 0.25}]
        with pytest.raises(InvalidRequestError, match="transcripts"):
            await client.score([])
