"""Joining a run: what host 0 sends, and what the joining host refuses."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.launcher.v1 import launcher_service_pb2 as pb

from services.chassis.errors import ConfigError, DependencyUnavailable, ServiceError
from services.launcher.hosts import other_hosts
from services.launcher.hosts.joined_host import JoinedHost
from services.launcher.hosts.other_hosts import FOLDER_MARK, OtherHosts
from services.launcher.hosts.run_certificates import secured
from services.launcher.layout import places
from services.launcher.process_plan import plan
from services.launcher.report.view import View
from tests.lib.launcher.support import make_config, make_layout

NODES = ("a: rollout", "b: rollout train; host 1")


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OtherHosts:
    """Of a run with a node on host 1, which trains; the model is not read."""
    monkeypatch.setattr(other_hosts, "fingerprint", lambda _: {"weights": "1"})
    config = make_config(nodes=NODES, hosts=("127.0.0.1", "127.0.0.2"))
    (tmp_path / "run.toml").write_text("[launcher]\n")
    made = make_layout(config, tmp_path)
    layout = replace(made, hosts=config.hosts, places=places(config))
    config, plans = secured(config, layout, plan(config, layout))
    return OtherHosts(config, layout, plans, View())


def report(join_id: str, **changes: Any) -> pb.ReportHostRequest:
    """A report of host 1."""
    return pb.ReportHostRequest(host=1, join_id=join_id, **changes)


async def test_a_host_gets_its_processes_and_their_keys_alone(
    hosts: OtherHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without paths of host 0; variables of its shell that are settings come along."""
    monkeypatch.setenv("SEAMFLOW_TRAINER_NUM_STEPS", "7")
    answer = await hosts.JoinRun(pb.JoinRunRequest(host=1), None)
    assert [each.name for each in answer.processes] == [
        "rollout_server-b",
        "trainer",
        "node_agent-b",
    ]
    texts = [text for each in answer.processes for text in each.environment.values()]
    texts += [part for each in answer.processes for part in each.command]
    assert [text for text in texts if str(tmp_path) in text] == []
    assert answer.processes[1].environment["SEAMFLOW_TRAINER_NUM_STEPS"] == "7"
    assert answer.processes[1].command[0] == "{python}"
    keys = {name for name in answer.files if name.endswith("key.pem")}
    services = ("node-agent", "rollout-server", "trainer")
    assert keys == {f"hosts/1/{name}/key.pem" for name in services}
    assert answer.needs_shared_folder


async def test_the_newest_caller_has_the_host(hosts: OtherHosts) -> None:
    """One before it ends; one of an earlier start of the launcher joins again."""
    first = await hosts.JoinRun(pb.JoinRunRequest(host=1), None)
    second = await hosts.JoinRun(pb.JoinRunRequest(host=1), None)
    orders = {
        first.join_id: pb.HOST_ORDER_SUPERSEDED,
        second.join_id: pb.HOST_ORDER_CONTINUE,
        "of another launcher": pb.HOST_ORDER_JOIN,
    }
    for join_id, order in orders.items():
        assert (await hosts.ReportHost(report(join_id), None)).order == order


async def test_a_host_that_the_run_does_not_have_is_refused(hosts: OtherHosts) -> None:
    """Host 0 is that of the launcher."""
    for number in (0, 2):
        with pytest.raises(ServiceError, match="the run has hosts 1 to 1"):
            await hosts.JoinRun(pb.JoinRunRequest(host=number), None)


async def test_what_cannot_run_on_a_host_ends_the_run(hosts: OtherHosts) -> None:
    """With the report of that host, and the code that stands for it."""
    answer = await hosts.JoinRun(pb.JoinRunRequest(host=1), None)
    watching = asyncio.ensure_future(hosts.watch())
    await asyncio.sleep(0)
    await hosts.ReportHost(report(answer.join_id, failure="trainer: no GPU", exit_code=78), None)
    with pytest.raises(DependencyUnavailable, match="host 1: trainer: no GPU") as caught:
        await watching
    assert caught.value.exit_code == 78


def joined(folder: Path, **changes: Any) -> JoinedHost:
    """Host 1 with this answer, in an empty folder of its own."""
    fields = {"run_id": "run", "folder": str(folder / "of-host-0"), "folder_mark": "m", **changes}
    given = argparse.Namespace(host=1, address="x:1", runs_folder=folder / "runs", patience=1.0)
    stub: Any = None
    return JoinedHost(stub, pb.JoinRunResponse(**fields), given)


def test_a_host_that_trains_needs_the_folder_of_host_0(tmp_path: Path) -> None:
    """The mark says whether the folder of that path is the same one."""
    mark = tmp_path / "of-host-0" / FOLDER_MARK
    mark.parent.mkdir(parents=True)
    mark.write_text("of another run")
    with pytest.raises(ConfigError, match="on a file system that both mount"):
        joined(tmp_path, needs_shared_folder=True)
    assert joined(tmp_path)._folder == tmp_path / "runs/run"
    mark.write_text("m")
    assert joined(tmp_path, needs_shared_folder=True)._folder == tmp_path / "of-host-0"


async def test_another_model_is_refused(tmp_path: Path) -> None:
    """Before anything starts; a missing one is named with its cure."""
    with pytest.raises(ConfigError, match=r"is not on this host: .*copy it here"):
        await joined(tmp_path, model=str(tmp_path / "nowhere")).until_order()


def test_files_stay_within_the_folder_and_are_for_this_user(tmp_path: Path) -> None:
    """Keys are among them."""
    host = joined(tmp_path, files={"hosts/1/trainer/key.pem": b"key"})
    host._write_files()
    file = tmp_path / "runs/run/hosts/1/trainer/key.pem"
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"key", 0o600)
    with pytest.raises(ConfigError, match="outside the run"):
        joined(tmp_path, files={"../../other": b"x"})._write_files()
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]


class Launcher:
    """Answers each report with an order; None: it does not answer."""

    def __init__(self, order: pb.HostOrder.ValueType | None) -> None:
        self._order = order

    async def ReportHost(self, _: pb.ReportHostRequest, timeout: float) -> pb.ReportHostResponse:
        """The order."""
        if self._order is None:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing)
        return pb.ReportHostResponse(order=self._order)


async def followed(folder: Path, order: pb.HostOrder.ValueType | None) -> pb.HostOrder.ValueType:
    """What a host does with a launcher that answers so, without patience."""
    given = argparse.Namespace(host=1, address="x:1", runs_folder=folder, patience=0.0)
    stub: Any = Launcher(order)
    answer = pb.JoinRunResponse(run_id="run", folder=str(folder / "no"))
    starting = asyncio.create_task(asyncio.sleep(0))
    return await JoinedHost(stub, answer, given)._follow(starting)


async def test_a_host_ends_or_joins_again_as_it_is_told(tmp_path: Path) -> None:
    """One that another has replaced ends with an error."""
    for order in (pb.HOST_ORDER_END, pb.HOST_ORDER_JOIN):
        assert await followed(tmp_path, order) == order
    with pytest.raises(DependencyUnavailable, match="another `seamflow join` has joined"):
        await followed(tmp_path, pb.HOST_ORDER_SUPERSEDED)


async def test_a_host_without_host_0_ends_with_the_reason(tmp_path: Path) -> None:
    """After its patience, with the code of a lost dependency."""
    with pytest.raises(DependencyUnavailable, match="has not answered for 0 s: --resume") as caught:
        await followed(tmp_path, None)
    assert caught.value.exit_code == 69
