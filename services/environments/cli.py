"""Entry point: `python -m services.environments`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NoReturn

from seamflow.client import Client
from seamflow.environment import EnvironmentClient

from services.chassis.rpc import clients
from services.chassis.rpc.server import Service, run
from services.environments.config import EnvironmentsConfig
from services.environments.episode_loop import EpisodeLoop

__all__ = ["build", "main"]


@asynccontextmanager
async def build(config: EnvironmentsConfig) -> AsyncIterator[Service]:
    """Connect to the rollout gateway and to the environment."""
    credentials = clients.credentials(config)
    token = config.environment_token
    theirs = replace(credentials, token=token.get_secret_value() if token else None)
    async with (
        Client(
            config.rollout_gateway,
            run_id=config.run_id,
            credentials=credentials,
            connect_timeout=None,
        ) as client,
        EnvironmentClient(
            config.environment, credentials=theirs, connect_timeout=None
        ) as environment,
    ):
        yield Service(background=[EpisodeLoop(config, client, environment).run])


def main() -> NoReturn:
    """Run episodes until SIGTERM."""
    run("environments", EnvironmentsConfig, build)
