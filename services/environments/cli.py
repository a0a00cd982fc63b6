"""Entry point: `python -m services.environments`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import NoReturn

from pydantic import SecretStr
from seamflow.client import Client
from seamflow.credentials import Credentials
from seamflow.environment import EnvironmentClient

from services.chassis.rpc import clients
from services.chassis.rpc.server import Service, run
from services.environments.config import EnvironmentsConfig
from services.environments.episode_loop import EpisodeLoop
from services.environments.reward_collector import RewardCollector


@asynccontextmanager
async def build(config: EnvironmentsConfig) -> AsyncIterator[Service]:
    """Connect to the rollout gateway, to the environment and to the reward server, if any."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            Client(
                config.rollout_gateway,
                run_id=config.run_id,
                credentials=clients.credentials(config),
                connect_timeout=None,
            )
        )
        environment = await stack.enter_async_context(
            _server(config, config.environment, config.environment_token)
        )
        rewards = None
        if config.reward_server is not None:
            server = _server(config, config.reward_server, config.reward_token)
            rewards = RewardCollector(await stack.enter_async_context(server))
        yield Service(background=[EpisodeLoop(config, client, environment, rewards).run])


def server_credentials(config: EnvironmentsConfig, token: SecretStr | None) -> Credentials:
    """What the servers of the user are shown: their own token, never that of the services."""
    if config.environment_plaintext:
        return clients.with_token(Credentials(), token)
    ours = clients.with_token(clients.credentials(config), token)
    return replace(ours, ca_file=config.environment_tls_ca_file or ours.ca_file)


def _server(config: EnvironmentsConfig, address: str, token: SecretStr | None) -> EnvironmentClient:
    credentials = server_credentials(config, token)
    return EnvironmentClient(address, credentials=credentials, connect_timeout=None)


def main() -> NoReturn:
    """Run episodes until SIGTERM."""
    run("environments", EnvironmentsConfig, build)
