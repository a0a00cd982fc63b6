"""Where the services of a run are: flag, then --run-folder, then environment, then runs/latest."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from seamflow.channel import CONNECT_TIMEOUT, connect
from seamflow.credentials import Credentials, SecretFile
from seamflow.errors import SeamflowError, UnavailableError, decode
from seamflow.inspect.lives import Life, lives, time_text
from seamflow.network.host_port import listens
from seamflow.stubs import async_stub
from seamflow.token_text import Decode, load_decoder, token_numbers
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

LATEST = Path("runs/latest")
_NOWHERE = "127.0.0.1:1"
"""An address without a listener."""


class UsageError(Exception):
    """The command line is invalid; the message names the cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One of the services that the command line asks."""

    name: str
    flag: str
    """Sets its address, and names it in `Endpoints`."""
    variable: str
    """Environment variable that sets its address."""
    key: str
    """In addresses.json."""
    default: str
    """Its usual address on this machine; empty: a run may do without, and it is asked only where
    its address is known."""
    module: str
    """Starts it: python -m MODULE."""


SERVICES = {
    service.flag.removeprefix("--").replace("-", "_"): service
    for service in (
        Service(
            name="trajectory manager",
            flag="--trajectory-manager",
            variable="SEAMFLOW_TRAJECTORY_MANAGER",
            key="trajectory_manager",
            default="127.0.0.1:50051",
            module="trajectory_manager",
        ),
        Service(
            name="rollout gateway",
            flag="--gateway",
            variable="SEAMFLOW_GATEWAY",
            key="rollout_gateway",
            default="127.0.0.1:50052",
            module="rollout.gateway",
        ),
        Service(
            name="scheduler",
            flag="--scheduler",
            variable="SEAMFLOW_SCHEDULER",
            key="scheduler",
            default="127.0.0.1:50053",
            module="scheduler",
        ),
        Service(
            name="trainer",
            flag="--trainer",
            variable="SEAMFLOW_TRAINER",
            key="trainer",
            default="127.0.0.1:50054",
            module="trainer",
        ),
        Service(
            name="weights service",
            flag="--weights",
            variable="SEAMFLOW_WEIGHTS",
            key="weights",
            default="127.0.0.1:50055",
            module="services.weights",
        ),
        Service(
            name="evaluator",
            flag="--evaluator",
            variable="SEAMFLOW_EVALUATOR",
            key="evaluator",
            default="",
            module="services.evaluator",
        ),
    )
}


_VARIABLES = [service.variable for service in SERVICES.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Addresses of the services, and the credentials for them."""

    run_id: str | None
    """Training job; None: the one the trainer reports."""
    services: Mapping[str, str]
    """host:port of each of SERVICES that the run has."""
    model: str | None = None
    """Model folder that the run started from; None: no run folder names it."""
    folder: Path | None = None
    """Folder of the run, if it is on this machine and names the services."""
    agents: str = ""
    """Who works on tasks: "runner", "program", "environment" or "outside"; empty: unknown."""
    started: float | None = None
    """Unix time at which the launcher started the run; None: unknown."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Zone by host of the run, as far as its nodes name them."""
    ended: str = ""
    """How the run of the folder ended, or that there is none, and what to do; empty: nobody knows
    that."""
    credentials: Credentials = field(default_factory=Credentials)
    """Token and certificates, if the services require them."""
    connect_timeout: float | None = CONNECT_TIMEOUT
    """As that of `seamflow.channel.connect`."""
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict, repr=False, compare=False)
    """Open ones by address."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to an address, until `close`. Raises `UsageError` for what is no address."""
        if address not in self.channels:
            try:
                opened = connect(address, self.credentials, connect_timeout=self.connect_timeout)
            except ValueError as error:
                raise UsageError(str(error)) from error
            self.channels[address] = opened
        return self.channels[address]

    def to(self, service: str) -> grpc.aio.Channel:
        """The channel to a service of SERVICES, known or not."""
        return self.channel(self.services.get(service, _NOWHERE))

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()


Command = Callable[[argparse.Namespace, Endpoints], Awaitable[int]]
"""What runs a command; returns its exit code."""


@asynccontextmanager
async def reached(endpoints: Endpoints, name: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the service `name` of SERVICES, whose failures say where it should be.

    Raises:
        SeamflowError: a call in the block failed.
    """
    if endpoints.ended:
        raise UnavailableError(endpoints.ended)
    try:
        yield endpoints.to(name)
    except grpc.aio.AioRpcError as error:
        raise _located(name, endpoints, decode(error)) from error
    except SeamflowError as error:
        raise _located(name, endpoints, error) from error


def _located(name: str, endpoints: Endpoints, error: SeamflowError) -> SeamflowError:
    """The error of an unreachable service, with its address and the settings that define it."""
    if not isinstance(error, UnavailableError):
        return error
    service = SERVICES[name]
    return UnavailableError(
        f"the {service.name} at {endpoints.services[name]} does not answer; its address is set by "
        f"{service.flag} or {service.variable}"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that calls services."""
    parser.add_argument("--run", help="training job; SEAMFLOW_RUN")
    parser.add_argument(
        "--run-folder", type=Path, help=f"runs/NAME with addresses.json (default: {LATEST})"
    )
    for service in SERVICES.values():
        parser.add_argument(
            service.flag, metavar="HOST:PORT", help=f"{service.name}; {service.variable}"
        )
    for part in ("ca", "cert", "key"):
        parser.add_argument(
            f"--tls-{part}-file", type=Path, help=f"PEM; SEAMFLOW_TLS_{part.upper()}_FILE"
        )


def resolve(given: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Endpoints:
    """Resolve all addresses; the token is SEAMFLOW_TOKEN or in the file SEAMFLOW_TOKEN_FILE.

    Raises `UsageError` for a run folder or a token file that cannot be read.
    """
    named = _read(given.run_folder) if given.run_folder else {}
    latest = _read(LATEST) if not given.run_folder and (LATEST / "addresses.json").is_file() else {}

    def first(flag: str | None, key: str, variable: str, default: str | None) -> str | None:
        return flag or named.get(key) or environment.get(variable) or latest.get(key) or default

    is_elsewhere = any(getattr(given, name) for name in SERVICES)
    is_known = named or latest or is_elsewhere or any(map(environment.get, _VARIABLES))
    ended = "" if is_known else _no_run()
    run_id = first(given.run, "run_id", "SEAMFLOW_RUN", None)
    is_here = run_id == (named or latest).get("run_id") and not is_elsewhere
    folder = (given.run_folder or LATEST) if (named or latest) and is_here else None
    return Endpoints(
        run_id=run_id,
        services={
            name: address
            for name, s in SERVICES.items()
            if (address := first(getattr(given, name), s.key, s.variable, s.default))
        },
        model=_model(given.run_folder or LATEST, named or latest),
        folder=folder,
        agents=(named or latest).get("agents", ""),
        started=None if folder is None else (folder / "addresses.json").stat().st_mtime,
        zones=(named or latest).get("zones", {}),
        ended=ended if folder is None else how_it_ended(folder, named or latest),
        credentials=Credentials(**_token(environment), **_tls(given, environment, named or latest)),
    )


def _no_run() -> str:
    """One line for people where nothing names a run; empty: a service has its usual address."""
    if any(each.default and listens(each.default) for each in SERVICES.values()):
        return ""
    return (
        f"there is no run here: {Path.cwd()} has no {LATEST}, and no service listens at its usual "
        "address: go to the folder of a project, or name a run's by --run-folder"
    )


def _model(folder: Path, addresses: Mapping[str, str]) -> str | None:
    """The model's folder, which moves with the run's if it is in there."""
    model, before = addresses.get("model"), addresses.get("folder")
    if model is None or before is None or not Path(model).is_relative_to(before):
        return model
    return str(folder.resolve() / Path(model).relative_to(before))


def _read(folder: Path) -> Mapping[str, Any]:
    file = folder / "addresses.json"
    try:
        addresses: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--run-folder {str(folder)!r}: {error}; name a folder that `seamflow train` made, "
            "such as runs/NAME"
        ) from error
    if not isinstance(addresses, dict):
        raise UsageError(f"{file} must hold a JSON object of addresses")
    return addresses


def _token(environment: Mapping[str, str]) -> dict[str, Any]:
    file = environment.get("SEAMFLOW_TOKEN_FILE")
    if file is None:
        return {"token": environment.get("SEAMFLOW_TOKEN")}
    try:
        SecretFile(Path(file))
    except OSError as error:
        raise UsageError(f"SEAMFLOW_TOKEN_FILE {file!r}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"SEAMFLOW_TOKEN_FILE: {error}") from error
    return {"token_file": Path(file)}


def _tls(
    given: argparse.Namespace, environment: Mapping[str, str], addresses: Mapping[str, str]
) -> Mapping[str, Any]:
    """Files that are named, or else those of a run on several hosts."""
    files = {}
    for part in ("ca", "cert", "key"):
        path = getattr(given, f"tls_{part}_file")
        named = environment.get(f"SEAMFLOW_TLS_{part.upper()}_FILE")
        if path or named:
            files[f"{part}_file"] = path or Path(str(named))
    for path in files.values():
        if not path.is_file():
            raise UsageError(f"TLS file {str(path)!r} does not exist")
    own = Path(addresses.get("credentials", ""))
    if not files and (own / "ca.pem").is_file():
        return {f"{part}_file": own / f"{part}.pem" for part in ("ca", "cert", "key")}
    return files


_KNOWN_BY = ("rollout_gateway", "trajectory_manager", "scheduler")


def how_it_ended(folder: Path, addresses: Mapping[str, str]) -> str:
    """One line for people; empty: it goes on, or `seamflow train` has not made the folder."""
    last = next(reversed(lives(folder)), Life(start=0.0, end=0.0, state="killed"))
    if last.end is None:
        return ""
    if last.state == "killed":
        return _killed(folder, addresses)
    reason = f" ({last.reason})" if last.reason else ""
    serve = f"`seamflow serve {_flags(folder, addresses)}`"
    how = f"{last.state} at {time_text(last.end)}{reason}"
    first = "once that is mended, " if last.state == "failed" else ""
    return (
        f"the run in {folder} {how}, and its services ended with it: {first}{serve} starts "
        "them again, with all that they recorded"
    )


def _killed(folder: Path, addresses: Mapping[str, str]) -> str:
    """Of a run that has not written how it ended, and that no service answers for."""
    is_up = any(listens(addresses.get(name, "")) for name in _KNOWN_BY)
    if is_up or not (folder / "logs").is_dir():
        return ""
    flags = _flags(folder, addresses)
    return (
        f"none of the services of the run in {folder} is up, and it has not ended by itself: "
        f"`seamflow train {flags}` continues it, `seamflow serve {flags}` starts its services; "
        f"logs: {folder / 'logs'}"
    )


def _flags(folder: Path, addresses: Mapping[str, str]) -> str:
    """Those that name the run; runs of older releases do not tell their file and folder."""
    name = shlex.quote(addresses.get("run_id", "NAME"))
    flags = f"--config {shlex.quote(addresses.get('config', 'FILE'))} --name {name}"
    here = folder.resolve()
    if addresses.get("folder", str(here)) != str(here):  # it was moved
        flags += f" --runs-folder {shlex.quote(str(here.parent))}"
    return f"{flags} --resume"


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
