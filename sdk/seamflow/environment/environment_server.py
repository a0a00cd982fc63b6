"""Serves an environment class or a reward function over gRPC.

class Guess:
    def reset(self, task, seed):
        self.number = random.Random(seed).randint(1, 9)
        return "Guess a number from 1 to 9."

    def step(self, message):
        return Step(rewards=float(message["content"] == str(self.number)), done=True)

serve(Guess, port=50070)
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from seamflow.channel import MAX_MESSAGE_BYTES
from seamflow.client.messages import to_dict
from seamflow.environment.call_error import Guard, from_user, invalid_field
from seamflow.environment.environment import RewardFunction
from seamflow.environment.environment_class import EnvironmentClass, reward_function
from seamflow.environment.environment_servicer import EnvironmentServicer
from seamflow.environment.episode_thread import EpisodeThread
from seamflow.environment.request_fields import check_name, to_task
from seamflow.environment.returned_values import MAX_OBSERVATION_BYTES, to_rewards
from seamflow.environment.v1 import reward_service_pb2 as pb
from seamflow.environment.v1.environment_service_pb2_grpc import (
    add_EnvironmentServiceServicer_to_server,
)
from seamflow.environment.v1.reward_service_pb2_grpc import (
    RewardServiceServicer,
    add_RewardServiceServicer_to_server,
)
from seamflow.user_code.user_calls import awaited

_MAX_TRANSCRIPTS = 256
_MAX_THREADS = 64

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Below the clients' ping interval, or their pings would count as abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A port in use must be an error, not a share of its connections.
    ("grpc.so_reuseport", 0),
]
_CLOSE_SECONDS = 5.0


class RewardServicer(RewardServiceServicer):
    """Scores with one function; a function that is not `async` runs in threads."""

    def __init__(self, reward: RewardFunction, guard: Guard) -> None:
        self._reward = reward
        self._guard = guard
        self._room = asyncio.Semaphore(_MAX_THREADS)

    async def Score(  # noqa: N802
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ScoreResponse:
        return await self._guard.answer(context, lambda: self._score_all(request))

    async def _score_all(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        number = len(request.transcripts)
        if not 1 <= number <= _MAX_TRANSCRIPTS:
            cure = f"send 1 to {_MAX_TRANSCRIPTS} transcripts"
            raise invalid_field("transcripts", f"{number} transcripts", cure)
        for index, transcript in enumerate(request.transcripts):
            check_name(f"transcripts[{index}].rollout_id", transcript.rollout_id)
        results = await asyncio.gather(
            *(self._score(index, each) for index, each in enumerate(request.transcripts))
        )
        return pb.ScoreResponse(results=results)

    async def _in_thread(self, *arguments: Any) -> Any:
        """What the function returns; one that never does holds neither others nor the end."""
        async with self._room:
            thread = EpisodeThread("reward")
            try:
                return await thread.run(self._reward, *arguments)
            finally:
                thread.end()

    async def _score(self, index: int, transcript: pb.Transcript) -> pb.ScoreResult:
        task = to_task(f"transcripts[{index}].task", transcript.task)
        messages = [to_dict(message) for message in transcript.messages]
        try:
            if inspect.iscoroutinefunction(self._reward):
                returned = await awaited(self._reward(task, messages))
            else:
                returned = await self._in_thread(task, messages)
            rewards = to_rewards("reward", returned)
        except Exception as error:
            what = f"reward of rollout {transcript.rollout_id!r} on task {task.task_id!r}"
            return pb.ScoreResult(error=from_user(error, what).status())
        return pb.ScoreResult(rewards=pb.TranscriptRewards(rewards=rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentServerConfig:
    """Settings of an environment server."""

    port: int = 0
    """Port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback a token is required."""
    max_episodes: int | None = None
    """Most episodes at once; None: the class's `max_episodes`, or 64."""
    idle_seconds: float = 3600.0
    """An episode without a call for this long makes room for others."""
    max_observation_bytes: int = MAX_OBSERVATION_BYTES
    """Most bytes of the messages and info of one answer; a larger one fails its episode."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that callers must present."""
    tls_cert_file: Path | None = None
    """PEM file of the certificate chain; None: plaintext."""
    tls_key_file: Path | None = None
    """PEM file of its private key."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for settings that cannot work."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}: must be 0 to 65535")
        if self.max_episodes is not None and self.max_episodes < 1:
            raise ValueError(f"max_episodes is {self.max_episodes}: must be at least 1")
        if not 0 < self.max_observation_bytes < MAX_MESSAGE_BYTES:
            raise ValueError(
                f"max_observation_bytes is {self.max_observation_bytes}: must be above 0 and below "
                f"{MAX_MESSAGE_BYTES}"
            )
        if self.idle_seconds <= 0:
            raise ValueError(f"idle_seconds is {self.idle_seconds}: must be above 0")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together: give both or none")
        if not self.token and not _is_loopback(self.host):
            raise ValueError(
                f"host is {self.host!r}, which other machines reach: give a token, or listen on "
                "127.0.0.1"
            )


@asynccontextmanager
async def serving(
    environment: Callable[[], Any] | None = None,
    config: EnvironmentServerConfig | None = None,
    *,
    reward: RewardFunction | None = None,
) -> AsyncIterator[int]:
    """Serve in this event loop; yields the port.

    Raises:
        ValueError: names what the class or function lacks.
        OSError: the port cannot be bound.
    """
    config = config or EnvironmentServerConfig()
    if environment is None and reward is None:
        raise ValueError("neither environment nor reward is given: give one, or both")
    server, guard = grpc.aio.server(options=_OPTIONS), Guard(config.token)
    servicer: EnvironmentServicer | None = None
    if environment is not None:
        declared = EnvironmentClass.of(environment, config.max_episodes)
        servicer = EnvironmentServicer(
            declared, guard, config.idle_seconds, config.max_observation_bytes
        )
        add_EnvironmentServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call,unused-ignore]
    if reward is not None:
        rewards = RewardServicer(reward_function(reward), guard)
        add_RewardServiceServicer_to_server(rewards, server)
    port = _bind(server, config)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.5)
        if servicer is not None:
            await servicer.episodes.close_all(_CLOSE_SECONDS)


def serve(
    environment: Callable[[], Any] | None = None,
    *,
    reward: RewardFunction | None = None,
    **settings: Any,
) -> None:
    """Serve until SIGTERM or SIGINT; `settings` are those of `EnvironmentServerConfig`.

    Prints {"port": …} once it listens.
    """
    config = EnvironmentServerConfig(**settings)
    asyncio.run(serve_until_signalled(environment, config, reward=reward))


async def serve_until_signalled(
    environment: Callable[[], Any] | None,
    config: EnvironmentServerConfig,
    *,
    reward: RewardFunction | None = None,
) -> None:
    """Like `serve`, in this event loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(environment, config, reward=reward) as port:
        print(json.dumps({"port": port}), flush=True)
        await stop.wait()


def _bind(server: grpc.aio.Server, config: EnvironmentServerConfig) -> int:
    host = f"[{config.host}]" if ":" in config.host else config.host
    target = f"{host}:{config.port}"
    try:
        if config.tls_cert_file is None or config.tls_key_file is None:
            return server.add_insecure_port(target)
        pair = (config.tls_key_file.read_bytes(), config.tls_cert_file.read_bytes())
        return server.add_secure_port(target, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise OSError(
            f"port {config.port} on {config.host} cannot be bound: choose another port, or 0 for a "
            "free one"
        ) from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
