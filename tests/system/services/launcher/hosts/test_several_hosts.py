"""A run on two hosts, two addresses of this machine: TLS, a killed host, a wrong secret."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

from services.launcher.hosts.run_certificates import JoinSecret
from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.lib.end_to_end.support import ROOT, child_environment
from tests.lib.redis_server import free_port

HOST_0, HOST_1 = "127.0.0.1", "127.0.0.2"
CONFIG = """
[launcher]
name = "hosts"
runs_folder = "{folder}/runs"
model = "{folder}/model"
tasks = "{folder}/tasks.jsonl"
agent = "examples.quickstart.agent:ElevatorAgent"
hosts = ["{HOST_0}", "{HOST_1}"]
join_port = {port}
nodes = ["node-a: train", "node-b: rollout; host 1"]
token_audit = true
group_size = 2
groups_per_step = 2
concurrency = 8

[trainer]
num_steps = 8

[rollout_server]
engine = "fake"
fake_vocab_size = 46
fake_mean_tokens = 8
max_context = 256

[dataloader]
epochs = 0
"""


@contextmanager
def command(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`seamflow ARGUMENTS`, killed at the end of the test."""
    with (
        log.open("ab") as out,
        subprocess.Popen(
            [sys.executable, "-m", "seamflow.cli.main", *arguments],
            cwd=ROOT,
            env=child_environment({}),
            stdout=out,
            stderr=out,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def wait_until(holds: Callable[[], bool], train: subprocess.Popen[bytes], log: Path) -> None:
    """Return once it holds; fails with the launcher's output if that has ended."""
    while not holds():
        assert train.poll() is None, log.read_text()
        time.sleep(0.05)


def num_steps(run: Path) -> int:
    """Optimizer steps so far."""
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def refused(secret: str, address: str, folder: Path) -> str:
    """What a host with this secret prints; it must end by itself."""
    file = folder / "other_secret"
    file.write_text(secret)
    log = folder / "refused.log"
    with command("join", address, "--host", "1", "--secret-file", str(file), log=log) as process:
        assert process.wait(60) == 78
    return log.read_text()


def calls_without_certificate(run: Path) -> grpc.StatusCode:
    """How the scheduler answers a caller who has the authority and no certificate."""
    authority = (run / "hosts/0/operator/ca.pem").read_bytes()
    address = json.loads((run / "addresses.json").read_text())["scheduler"]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority)) as channel:
        call: Any = channel.unary_unary("/seamflow.scheduler.v1.SchedulerService/ListNodes")
        with pytest.raises(grpc.RpcError) as caught:
            call(scheduler_pb.ListNodesRequest().SerializeToString(), timeout=10)
    error: Any = caught.value
    return grpc.StatusCode(error.code())


@pytest.mark.long(short="tests/unit/services/launcher/hosts/test_host_plan.py")
@pytest.mark.timeout(300)
def test_a_run_on_two_hosts_goes_on_when_one_is_killed(tmp_path: Path) -> None:
    """The host joins again and the run ends in order; controls: a wrong secret, no certificate."""
    make_quickstart(tmp_path)
    port, run = free_port(), tmp_path / "runs/hosts"
    names = {"folder": tmp_path, "port": port, "HOST_0": HOST_0, "HOST_1": HOST_1}
    (tmp_path / "run.toml").write_text(CONFIG.format(**names))
    address, secret = f"{HOST_0}:{port}", run / "hosts/join_secret"
    logs = {name: tmp_path / f"{name}.log" for name in ("train", "join")}
    join = ("join", address, "--host", "1", "--secret-file", str(secret))
    with command("train", "--config", str(tmp_path / "run.toml"), log=logs["train"]) as train:
        with command(*join, log=logs["join"]) as first:  # waits for the launcher
            wait_until(lambda: num_steps(run) > 0, train, logs["train"])
            first.kill()
        steps = num_steps(run)
        with command(*join, log=logs["join"]) as second:
            right = JoinSecret.read(secret.read_text())
            other = JoinSecret("guessed", right.authority).text()
            assert "refuses the secret" in refused(other, address, tmp_path)
            assert calls_without_certificate(run) == grpc.StatusCode.UNAVAILABLE
            assert train.wait(120) == 0, logs["train"].read_text() + logs["join"].read_text()
            assert second.wait(60) == 0, logs["join"].read_text()
    assert steps < 8
    summary = json.loads((run / "summary.json").read_text())
    assert summary["optimizer_steps"] == 8
    assert (summary["tokens_lost"], summary["tokens_duplicated"]) == (0, 0)
    assert logs["train"].read_text().count("host 1 (127.0.0.2) has joined") == 2
