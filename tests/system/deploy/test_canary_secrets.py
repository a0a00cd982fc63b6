"""Nothing secret leaves a process: secrets that are easy to find, searched for in all it shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis

from rollout.http_gateway.config import HttpGatewayConfig
from scheduler.config import SchedulerConfig
from services.chassis.config.load import load
from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.chassis.redis.url import parse_redis_url
from tests.lib.deploy.support import ROOT, announced, running
from tests.lib.redis_server import RedisServer, free_port

CANARY = "canary7f3e"
NAME = "visible-name"
"""Not secret: what is searched must hold it, or the search looks at the wrong thing."""
MODULES = {"scheduler": "scheduler", "http_gateway": "rollout.http_gateway"}
CONFIGS: dict[str, type[ServerConfig]] = {
    "scheduler": SchedulerConfig,
    "http_gateway": HttpGatewayConfig,
}


@dataclass(frozen=True)
class Shown:
    """What one process shows to others."""

    log: str
    command_line: str
    pages: str
    refusals: str


def settings(folder: Path, redis: RedisServer, table: str) -> dict[str, str]:
    """Environment of a process: each secret in a file or a variable."""
    (folder / "token").write_text(f"{CANARY}-token")
    (folder / "tokens").mkdir(exist_ok=True)
    (folder / "tokens" / "trainer").write_text(f"{CANARY}-trainer")
    (folder / "redis_url").write_text(redis.url.replace("//", f"//worker:{CANARY}-redis@", 1))
    given = {
        "token_file": str(folder / "token"),
        "service_tokens_folder": str(folder / "tokens"),
        "agent_token": f"{CANARY}-agent",
        "operator_token": f"{CANARY}-operator",
        "instance": NAME,
        "log_level": "debug",
        "port": "0",
    }
    if table == "http_gateway":
        given |= {"run_id": NAME, "rollout_gateway": f"127.0.0.1:{free_port()}"}
    else:
        given |= {"redis_url_file": str(folder / "redis_url")}
    return {f"SEAMFLOW_{table}_{name}".upper(): value for name, value in given.items()}


def shown_by(folder: Path, redis: RedisServer, table: str) -> Shown:
    """Start the process, ask it what there is to ask, end it."""
    environment = {
        **os.environ,
        **settings(folder, redis, table),
        "PYTHONPATH": ":".join(sys.path),
        "SEAMFLOW_PORT_FILE": str(folder / f"{table}.json"),
    }
    command = [sys.executable, "-m", MODULES[table]]
    log = folder / f"{table}.log"
    with running(command, environment, log) as process:
        ports = announced(process, folder / f"{table}.json")
        command_line = Path(f"/proc/{process.pid}/cmdline").read_text()
        refusals = refused(ports)
        pages = "".join(page(ports["admin_port"], each) for each in ("metrics", "version", "x"))
    return Shown(log.read_text(), command_line, pages, refusals)


def page(port: int, path: str, token: str | None = None, body: bytes | None = None) -> str:
    """Status line and body of an HTTP page."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return f"{error}{error.headers}{error.read()!r}"


def refused(ports: dict[str, int]) -> str:
    """Errors of calls with wrong tokens, right ones without permission, and malformed messages."""
    texts = []
    with grpc.insecure_channel(f"127.0.0.1:{ports['port']}") as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        for method in (
            "trajectory.v1.RunService/DeleteRun",
            "scheduler.v1.SchedulerService/Heartbeat",
        ):
            for token in ("wrong", "trainer", "agent", "operator"):
                call: Any = channel.unary_unary(f"/seamflow.{method}")
                metadata = (("authorization", f"Bearer {CANARY}-{token}"),)
                try:
                    call(b"\xff", metadata=metadata, timeout=10)
                except grpc.RpcError as error:
                    texts.append(f"{error}{error.trailing_metadata()}")
    if "http_port" in ports:
        paths = ("rollouts/lease", "nowhere")
        texts += [page(ports["http_port"], path, f"{CANARY}-credential", b"{") for path in paths]
    return "\n".join(texts)


@pytest.mark.parametrize("table", MODULES)
def test_no_secret_is_shown(tmp_path: Path, redis_server: RedisServer, table: str) -> None:
    """Logs at debug, ps, metrics, version, errors of calls."""
    add_user(redis_server)
    shown = shown_by(tmp_path, redis_server, table)
    for where, text in vars(shown).items():
        assert CANARY not in text, where
    # Control: the search looks at what the process really shows.
    assert NAME in shown.log
    assert NAME in shown.pages
    assert MODULES[table] in shown.command_line
    assert ("HTTP Error 4" if table == "http_gateway" else "UNAUTHENTICATED") in shown.refusals


@pytest.mark.parametrize("table", MODULES)
def test_no_secret_is_printed_as_configuration(
    tmp_path: Path,
    redis_server: RedisServer,
    table: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--print-config has stars, and the error of a mistake beside or in a secret no value."""
    for name, value in settings(tmp_path, redis_server, table).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        load(CONFIGS[table], table, ["--print-config"])
    printed = capsys.readouterr().out
    assert CANARY not in printed
    assert printed.count('"***"') == (4 if table == "scheduler" else 3)
    mistakes = ["--drain-seconds=no"], [f"--token={CANARY}", f"--token-file={CANARY}"]
    for mistake in mistakes:
        with pytest.raises(ConfigError) as wrong:
            load(CONFIGS[table], table, mistake)
        assert f"{CANARY}-" not in str(wrong.value)


def test_no_password_is_in_the_error_of_a_redis_url() -> None:
    """Whatever is wrong with it."""
    for scheme, end in (("ftp", ""), ("redis", "/x"), ("redis", "?nothing=1")):
        with pytest.raises(ConfigError) as wrong:
            parse_redis_url(f"{scheme}://worker:{CANARY}@127.0.0.1:1{end}")
        assert CANARY not in str(wrong.value)


def test_a_secret_given_as_a_flag_is_found(tmp_path: Path) -> None:
    """Negative control: ps shows flags, so that secrets belong into files or variables."""
    says_it_runs = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{}'); input()"
    ports = tmp_path / "ports.json"
    command = [sys.executable, "-c", says_it_runs, str(ports), f"--token={CANARY}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        while not ports.exists():
            time.sleep(0.01)
        assert CANARY in Path(f"/proc/{process.pid}/cmdline").read_text()


def add_user(redis: RedisServer) -> None:
    """The user whose password is a canary."""
    with Redis.from_url(redis.url) as admin:
        rule = ("worker", "on", f">{CANARY}-redis", "~*", "&*", "+@all")
        admin.execute_command("ACL SETUSER", *rule)


def test_images_leave_secrets_out() -> None:
    """Whatever lies in the folder of a local deployment does not travel to the builder."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines.index("deploy/secrets") > lines.index("!deploy")
    assert "*" in lines
    assert not {"!.git", "!runs", "!."} & set(lines)
