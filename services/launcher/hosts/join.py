"""`seamflow join HOST0:PORT --host N`: start this host's processes of a run on several hosts.

The launcher on host 0 says what to start and sends configuration and certificates. Processes that
crash are started again; all end with the run, or when host 0 has not answered for --patience.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import grpc.aio
from seamflow.channel import connect
from seamflow.credentials import Credentials
from seamflow.errors import decode
from seamflow.launcher.v1 import launcher_service_pb2 as pb
from seamflow.launcher.v1.launcher_service_pb2_grpc import LauncherServiceStub
from seamflow.network.host_port import host_and_port
from seamflow.stubs import async_stub

from services.chassis.errors import ConfigError, DependencyUnavailable, ExitCode, StartupError
from services.launcher.hosts.joined_host import JoinedHost
from services.launcher.hosts.run_certificates import JoinSecret

if TYPE_CHECKING:
    from seamflow.launcher.v1.launcher_service_pb2_grpc import LauncherServiceAsyncStub

_VARIABLE = "SEAMFLOW_JOIN_SECRET"
_RETRY_SECONDS = 1.0
_CALL_SECONDS = 10.0
_REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)
_OTHER_AUTHORITY = "CERTIFICATE_VERIFY_FAILED"
_OTHER_NAME = "Hostname Verification Check failed"


def main() -> NoReturn:
    """Join, and work until the run ends; exits with a code of `ExitCode`, after Ctrl-C with 130."""
    given = _parser().parse_args()
    try:
        host_and_port(given.address)
        asyncio.run(_joined(given))
    except StartupError as error:
        print(f"join: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ValueError as error:
        print(f"join: {error}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    except KeyboardInterrupt:
        print("join: stopped; the processes of this host have ended", file=sys.stderr)
        sys.exit(130)
    sys.exit(ExitCode.CLEAN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seamflow join",
        description="Start this host's processes of a run that `seamflow train` began elsewhere.",
        allow_abbrev=False,
    )
    parser.add_argument("address", metavar="HOST0:PORT", help="as the launcher prints it")
    parser.add_argument(
        "--host", type=int, required=True, help="place of this host in `hosts`, from 1"
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        help=f"copy of hosts/join_secret in the run's folder; or its text in {_VARIABLE}",
    )
    parser.add_argument(
        "--runs-folder",
        type=Path,
        default=Path("runs"),
        help="of run folders, where host 0's is not shared (runs)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=300.0,
        help="seconds without an answer of host 0, at the start too (300)",
    )
    return parser


async def _joined(given: argparse.Namespace) -> None:
    """Work for the run until it ends; a launcher that was started anew is joined again."""
    secret = await _secret(given)
    with tempfile.TemporaryDirectory(prefix="seamflow-join-") as folder:
        authority = Path(folder) / "ca.pem"
        authority.write_text(secret.authority, encoding="ascii")
        shown = Credentials(token=secret.token, ca_file=authority)
        async with connect(given.address, shown, connect_timeout=None) as channel:
            stub = async_stub(LauncherServiceStub, channel)
            order = pb.HOST_ORDER_JOIN
            while order == pb.HOST_ORDER_JOIN:
                answer = await _answer(stub, given)
                print(f"joined run {answer.run_id!r} as host {given.host}", flush=True)
                order = await JoinedHost(stub, answer, given).until_order()
    print(f"the run {answer.run_id!r} has ended")


async def _secret(given: argparse.Namespace) -> JoinSecret:
    """From file or variable; waits for a file that the launcher has yet to write."""
    if given.secret_file is None and not os.environ.get(_VARIABLE):
        raise ConfigError(f"there is no secret: give --secret-file, or its text in {_VARIABLE}")
    if given.secret_file is None:
        return JoinSecret.read(os.environ[_VARIABLE])
    limit = time.monotonic() + given.patience
    while time.monotonic() < limit:
        try:
            if text := given.secret_file.read_text(encoding="utf-8"):
                return JoinSecret.read(text)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise ConfigError(f"--secret-file {str(given.secret_file)!r}: {error}") from error
        await asyncio.sleep(_RETRY_SECONDS)
    raise ConfigError(f"--secret-file {str(given.secret_file)!r} does not exist: name a copy")


async def _answer(stub: LauncherServiceAsyncStub, given: argparse.Namespace) -> pb.JoinRunResponse:
    """The processes of this host, sent by the launcher when the run starts."""
    limit = time.monotonic() + given.patience
    while True:
        try:
            request = pb.JoinRunRequest(host=given.host)
            return await stub.JoinRun(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            _check(error, given)
            if time.monotonic() > limit:
                raise DependencyUnavailable("host 0", _silence(given)) from error
        await asyncio.sleep(_RETRY_SECONDS)


def _check(error: grpc.aio.AioRpcError, given: argparse.Namespace) -> None:
    """Raise `ConfigError` where another try would get the same answer."""
    if error.code() == grpc.StatusCode.UNAUTHENTICATED or _OTHER_AUTHORITY in str(error.details()):
        raise ConfigError(
            f"the launcher at {given.address} refuses the secret: it is of another run; copy "
            "hosts/join_secret of this run's folder again"
        ) from error
    if _OTHER_NAME in str(error.details()):
        raise ConfigError(
            f"the launcher's certificate does not name {given.address.rpartition(':')[0]!r}: give "
            "the address as `seamflow train` prints it, or as the first of hosts names it"
        ) from error
    if error.code() in _REFUSED:
        raise ConfigError(f"the launcher at {given.address}: {decode(error)}") from error


def _silence(given: argparse.Namespace) -> str:
    return (
        f"the launcher at {given.address} has not answered for {given.patience:.0f} s: see whether "
        "`seamflow train` runs there and the port can be reached; --resume it, then join again"
    )
