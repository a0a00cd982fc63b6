"""Rewards by a reward server: added, in batches, waited for, never made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trustme
from pydantic import SecretStr, ValidationError
from seamflow.common.v1 import tokens_pb2
from seamflow.credentials import Credentials
from seamflow.environment import (
    EnvironmentClient,
    EnvironmentServerConfig,
    Step,
    Task,
    Transcript,
    serving,
)
from seamflow.errors import InvalidRequestError, SeamflowError

from services.chassis.errors import ConfigError
from services.environments.cli import build, server_credentials
from services.environments.config import EnvironmentsConfig
from services.environments.reward_collector import RewardCollector
from tests.lib.environments.stepped import Counting, Drives
from tests.lib.environments.support import World, rewards_of, served, working, world
from tests.lib.redis_server import free_port

ENVIRONMENT = tokens_pb2.FAILURE_CLASS_ENVIRONMENT
INFRASTRUCTURE = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE


class Quiet:
    """Answers once, without rewards."""

    ended: ClassVar[asyncio.Event]

    def __init__(self) -> None:
        self.steps_left = 2

    async def reset(self, task: Task, seed: int) -> str:
        """The question."""
        return "go"

    async def step(self, message: Mapping[str, Any]) -> Step:
        """More, then the end."""
        self.steps_left -= 1
        if not self.steps_left:
            Quiet.ended.set()
        return Step(messages="more", rewards={}, done=not self.steps_left)


async def judge(task: Task, transcript: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Two rewards; fails for tasks with "bad"."""
    if task.payload.get("bad"):
        raise RuntimeError("no opinion")
    assert [each["role"] for each in transcript] == ["user", "assistant", "user", "assistant"]
    assert transcript[-1]["content"] == "hello"
    return {"reward": 0.5, "style": float(len(transcript))}


async def length(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """Named "reward"."""
    return float(len(transcript))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[World]:
    """A run whose policy always says "hello"."""
    Quiet.ended = asyncio.Event()
    async with world(tmp_path) as found:
        found.always_say("hello")
        yield found


async def test_its_rewards_are_those_of_the_rollout(run: World) -> None:
    """Several, by name, from the whole conversation."""
    await run.submit("{}", "{}")
    async with (
        served(Quiet, reward=judge) as server,
        working(run, server, reward_server=server),
    ):
        found = await run.ended(2)
    for each in found:
        assert rewards_of(each) == {("reward", ""): 0.5, ("style", ""): 4.0}


async def test_a_transcript_that_cannot_be_scored_fails_alone(run: World) -> None:
    """With the words of the function; the others have their rewards."""
    await run.submit('{"bad": true}', "{}", "{}")
    async with (
        served(Quiet, reward=judge) as server,
        working(run, server, reward_server=server),
    ):
        found = {each.rollout_id.partition("/")[0]: each for each in await run.ended(3)}
    assert not found["t0"].HasField("rewards")
    assert found["t0"].failure.failure_class == ENVIRONMENT
    assert "RuntimeError('no opinion')" in found["t0"].failure.message
    assert all(rewards_of(found[name])["reward", ""] == 0.5 for name in ("t1", "t2"))


async def test_a_name_given_twice_fails_and_is_named(run: World) -> None:
    """The sum would be a guess."""
    await run.submit('{"turns": 2}')
    async with (
        served(Counting, reward=length) as server,
        working(run, server, reward_server=server),
    ):
        found = (await run.ended(1))[0]
    assert not found.HasField("rewards")
    assert found.failure.failure_class == ENVIRONMENT
    assert "reward 'reward' is given by the environment and by reward_server" in (
        found.failure.message
    )


async def test_an_unavailable_server_is_waited_for(run: World) -> None:
    """The episode ends when the server has come."""
    port = free_port()
    await run.submit("{}")
    async with (
        served(Quiet) as environment,
        working(run, environment, reward_server=f"127.0.0.1:{port}"),
    ):
        await Quiet.ended.wait()
        async with serving(None, EnvironmentServerConfig(port=port), reward=judge):
            (found,) = await run.ended(1)
    assert rewards_of(found)["reward", ""] == 0.5


async def test_a_server_that_never_comes_is_a_failure_of_infrastructure(run: World) -> None:
    """By the deadline of the episode; never a reward."""
    address = f"127.0.0.1:{free_port()}"
    await run.submit("{}")
    async with (
        served(Quiet) as environment,
        working(run, environment, reward_server=address, episode_timeout_seconds=5.0),
    ):
        found = (await run.ended(1))[0]
    assert not found.HasField("rewards")
    assert found.failure.failure_class == INFRASTRUCTURE
    assert f"reward_server {address} gave no rewards" in found.failure.message


class FakeClient:
    """Keeps the batches; refuses those with a transcript called "bad"."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_cancelled = 0
        self.lost_results = 0

    async def score(
        self, transcripts: Sequence[Transcript], *, timeout: float | None = 60.0
    ) -> list[dict[str, float] | SeamflowError]:
        """One reward each."""
        self.batches.append(len(transcripts))
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if any(each.rollout_id == "bad" for each in transcripts):
            raise InvalidRequestError("transcripts[1] is bad")
        found: list[dict[str, float] | SeamflowError] = [{"reward": 1.0} for _ in transcripts]
        return found[self.lost_results :]


def transcript(name: str) -> Transcript:
    """One that a fake scores."""
    return Transcript(rollout_id=name, task=Task(task_id="t", payload={}), messages=[])


async def test_transcripts_are_scored_in_batches() -> None:
    """Of at most 32, the rest after 50 ms."""
    client = FakeClient()
    collector = RewardCollector(client)  # type: ignore[arg-type]
    found = await asyncio.gather(*(collector.score(transcript(f"r{i}")) for i in range(40)))
    assert found == [{"reward": 1.0}] * 40
    assert client.batches == [32, 8]


async def test_a_transcript_that_is_refused_is_found_among_the_others() -> None:
    """The batch is sent again one by one."""
    client = FakeClient()
    collector = RewardCollector(client)  # type: ignore[arg-type]
    names = ("a", "bad", "c")
    calls = (collector.score(transcript(name)) for name in names)
    a, bad, c = await asyncio.gather(*calls, return_exceptions=True)
    assert a == c == {"reward": 1.0}
    assert isinstance(bad, InvalidRequestError)
    assert client.batches == [3, 1, 1, 1]


async def test_a_call_that_nobody_waits_for_ends() -> None:
    """And a call that someone waits for does not."""
    client = FakeClient()
    client.may_answer.clear()
    collector = RewardCollector(client)  # type: ignore[arg-type]
    first, second = (asyncio.create_task(collector.score(transcript(n))) for n in "ab")
    while not client.batches:
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert client.num_cancelled == 0
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await asyncio.sleep(0)
    assert client.num_cancelled == 1


async def test_fewer_results_than_transcripts_are_no_rewards() -> None:
    """They cannot be told apart."""
    client = FakeClient()
    client.lost_results = 1
    collector = RewardCollector(client)  # type: ignore[arg-type]
    calls = (collector.score(transcript(name)) for name in "ab")
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all("returned 1 results for 2 transcripts" in str(each) for each in found)


async def test_a_self_driving_environment_has_no_transcript_to_score(run: World) -> None:
    """The process ends with the names of both settings."""
    async with served(Drives) as environment:
        config = EnvironmentsConfig(
            run_id="run",
            rollout_gateway=run.gateway,
            environment=environment,
            reward_server=environment,
            admin_port=-1,
        )
        async with build(config) as service:
            with pytest.raises(ConfigError, match=r"reward_server is .* self-driving"):
                await service.background[0]()


async def test_servers_with_certificates_of_another_authority(run: World, tmp_path: Path) -> None:
    """environment_tls_ca_file is theirs alone; a client that trusts another authority fails."""
    paths = certificates(tmp_path, trustme.CA(), "server")
    foreign = certificates(tmp_path, trustme.CA(), "foreign")
    tls = {"tls_cert_file": paths["cert"], "tls_key_file": paths["key"]}
    await run.submit("{}")
    async with (
        served(Quiet, reward=judge, **tls) as server,
        working(run, server, reward_server=server, environment_tls_ca_file=paths["ca"]),
    ):
        (found,) = await run.ended(1)
        async with EnvironmentClient(
            server, credentials=Credentials(ca_file=foreign["ca"]), connect_timeout=0.5
        ) as stranger:
            with pytest.raises(SeamflowError):
                await stranger.describe(timeout=5)
    assert rewards_of(found)["reward", ""] == 0.5


def certificates(folder: Path, authority: trustme.CA, name: str) -> dict[str, Path]:
    """Files of an authority, and of a certificate of it for 127.0.0.1."""
    certificate = authority.issue_cert("127.0.0.1")
    paths = {kind: folder / f"{name}.{kind}" for kind in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    certificate.cert_chain_pems[0].write_to_path(paths["cert"])
    certificate.private_key_pem.write_to_path(paths["key"])
    return paths


def test_plaintext_servers_beside_services_with_tls(tmp_path: Path) -> None:
    """The process's own authority is asked of them unless they are plaintext."""
    paths = certificates(tmp_path, trustme.CA(), "ours")
    config = EnvironmentsConfig(
        run_id="run", environment="h:1", tls_ca_file=paths["ca"], token="services"
    )
    theirs = SecretStr("theirs")
    assert server_credentials(config, theirs) == Credentials(token="theirs", ca_file=paths["ca"])
    plain = config.replace(environment_plaintext=True)
    assert server_credentials(plain, theirs) == Credentials(token="theirs")
    assert server_credentials(plain, None) == Credentials()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"environment_tls_ca_file": "/nowhere"}, "environment_tls_ca_file is '/nowhere', which"),
        (
            {"environment_tls_ca_file": __file__, "environment_plaintext": True},
            "environment_plaintext is true: give one of them",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], words: str) -> None:
    """With the cure."""
    with pytest.raises(ValidationError, match=words):
        EnvironmentsConfig(run_id="run", environment="h:1", **settings)
