"""Entry point: `python -m services.evaluator`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from seamflow.evaluator.v1.evaluator_service_pb2_grpc import add_EvaluatorServiceServicer_to_server

from services.chassis.errors import ConfigError
from services.chassis.rpc.server import Service, run
from services.evaluator.clients import connected
from services.evaluator.config import EvaluatorConfig
from services.evaluator.evaluation import Evaluation
from services.evaluator.evaluator import Evaluator
from services.evaluator.heldout_tasks import heldout_tasks
from services.evaluator.servicer import EvaluatorServicer
from services.evaluator.trainer_client import TrainerClient


def main() -> None:
    """Evaluate until the run is over, and answer until SIGTERM."""
    run("evaluator", EvaluatorConfig, build)


@asynccontextmanager
async def build(config: EvaluatorConfig) -> AsyncIterator[Service]:
    """Read the held-out tasks and what was evaluated so far; open the channels."""
    _make_folder(config.folder)
    tasks = await heldout_tasks(config)
    async with connected(config) as clients:
        evaluation = Evaluation(config, clients, tasks)
        evaluator = Evaluator(config, clients, evaluation, TrainerClient(clients))
        servicer = EvaluatorServicer(config.run_id, evaluator)
        yield Service(
            servicers=[(add_EvaluatorServiceServicer_to_server, servicer)],
            background=[evaluator.run],
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"folder {str(folder)!r} cannot be made: {error.strerror}; give one that this process "
            "may write"
        ) from error
