"""The run that a command is about, and the tokenizer of its model."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from seamflow.inspect.endpoints import Endpoints, UsageError, reached
from seamflow.stubs import async_stub
from seamflow.token_text import Decode, load_decoder, token_numbers
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub


@asynccontextmanager
async def manager_of_run(endpoints: Endpoints) -> AsyncIterator[tuple[grpc.aio.Channel, str]]:
    """A channel to the trajectory manager, and the run: the given one, or else the trainer's.

    Raises:
        UsageError: no run is given and no trainer answers.
        SeamflowError: a call in the block failed.
    """
    run_id = endpoints.run_id or await _trainers_run(endpoints)
    async with reached(endpoints, "trajectory_manager") as channel:
        yield channel, run_id


def required_run(endpoints: Endpoints) -> str:
    """The run that is named. Raises `UsageError` if none is."""
    if not endpoints.run_id:
        raise UsageError("--run is missing: name the run, or set SEAMFLOW_RUN")
    return endpoints.run_id


def decoder_of(folder: Path | None, endpoints: Endpoints) -> Decode:
    """The tokenizer of --model or, without it, of the run's model; else ids as numbers."""
    if folder is None:
        return _runs_decoder(endpoints)
    try:
        return load_decoder(folder)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error


def _runs_decoder(endpoints: Endpoints) -> Decode:
    if endpoints.model is None:
        note("ids stand for text: name the model's folder with --model or --run-folder")
        return token_numbers
    try:
        return load_decoder(endpoints.model)
    except ValueError as error:
        note(f"ids stand for text: {error}")
        return token_numbers


def note(text: str) -> None:
    """Write a line beside the output."""
    sys.stderr.write(f"seamflow: {text}\n")


async def _trainers_run(endpoints: Endpoints) -> str:
    stub = async_stub(TrainerServiceStub, endpoints.to("trainer"))
    try:
        return (await stub.GetStatus(trainer_pb.GetStatusRequest(), timeout=5)).run_id
    except grpc.aio.AioRpcError as error:
        raise UsageError(
            "the run is unknown: name it with --run, SEAMFLOW_RUN or --run-folder"
        ) from error
