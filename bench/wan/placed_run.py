"""A run with generation in the eastern namespace and training in the western one.

`python -m bench.wan.placed_run FOLDER MODE QUICK`, in the eastern one, is the launcher's own run of
a mode of Echo, but that trainer, weights service, scheduler and the node agent of the trainer are
started beyond the link. It trains until told to end, and leaves the launcher's summary. All calls
have TLS.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from seamflow.channel import connect
from seamflow.credentials import Credentials
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

from bench.harness.processes import ROOT, Child, environment
from bench.wan.slow_link import ADDRESSES, NAMESPACES
from services.chassis.config.load import load
from services.launcher import redis_server
from services.launcher.child_process import ProcessPlan, settings_of
from services.launcher.cli import make_layout
from services.launcher.config import LauncherConfig, own_settings
from services.launcher.hosts.other_hosts import host_variables
from services.launcher.hosts.run_certificates import hosts_folder, secured
from services.launcher.layout import Layout
from services.launcher.process_plan import plan
from services.launcher.report.summary import trajectories
from services.launcher.report.view import View
from services.launcher.run import Run
from services.launcher.service_clients import connected
from services.lib.redis_binary import find_redis_server

RUN = "runs/wan"
"""The run's folder in that of the measurement."""
FINISH = "finish"
"""A file of this name ends training."""
FAILED = "failed_rollouts"
"""File with their number before the end."""
_MODES = ROOT / "examples/papers"
_WITH_TRAINING = ("weights", "scheduler")
_OWN_REDIS = 6379
"""Port of the western Redis; no other process of that namespace has one."""
_LOOK_SECONDS = 0.2
_FLAGS = {
    "name": "wan",
    "nodes": json.dumps(["node-a: rollout; zone east", "node-b: train; host 1; zone west"]),
    "hosts": json.dumps(ADDRESSES[::-1]),
    "heldout-tasks": "",
    "console": "false",
    "concurrency": "32",
}
_SETTINGS = (
    "trainer.num_steps=1000000",
    # Both namespaces see the same folders, which two places do not.
    'rollout_server.weight_transports=["relay","shard_stream"]',
)
_QUICK = ("rollout_server.engine=fake", "rollout_server.fake_vocab_size=46")


def main() -> None:
    """Train until told to end, then write the summary."""
    folder, file = Path(sys.argv[1]), _MODES / f"echo_{sys.argv[2]}.toml"
    config = _config(folder, file, is_quick=sys.argv[3] == "True")
    own = make_layout(config, file)
    layout = replace(own, places={**own.places, **dict.fromkeys(_WITH_TRAINING, (1,))})
    config, plans = _placed(config, layout)
    os.environ.update(environment(host_variables(layout.hosts[0], layout.hosts)))
    with _western_redis(folder), View(layout.folder / "metrics.jsonl") as view:
        run = Run(config, layout, plans, view)
        summary = asyncio.run(_trained(run, folder / FINISH))
    (layout.folder / "summary.json").write_text(json.dumps(summary))


def _config(folder: Path, file: Path, *, is_quick: bool) -> LauncherConfig:
    flags = {**_FLAGS, "runs-folder": str(folder / "runs")}
    if is_quick:
        flags["prepare"] = "tests.lib.end_to_end.quickstart_files"
        flags["tasks"] = "{run}/prepared/tasks.jsonl"
    given = [f"--{name}={value}" for name, value in flags.items()]
    given += [f"--set={each}" for each in _SETTINGS + _QUICK * is_quick]
    return load(LauncherConfig, "launcher", own_settings(["--config", str(file), *given]))


def _placed(
    config: LauncherConfig, layout: Layout
) -> tuple[LauncherConfig, dict[str, ProcessPlan]]:
    """Settings with certificates, and the processes of both places as this launcher starts them."""
    redis = redis_server.server_plan(config, layout.folder, layout.ports["redis"])
    plans = {"redis": redis, **plan(config, layout)}
    for name in _WITH_TRAINING:
        url = settings_of(name, redis_url=f"redis://127.0.0.1:{_OWN_REDIS}")
        environment = {**plans[name].environment, **url}
        plans[name] = replace(plans[name], host=1, environment=environment)
    config, plans = secured(config, layout, plans)
    return config, {name: _in_namespace(each) for name, each in plans.items()}


def _in_namespace(process: ProcessPlan) -> ProcessPlan:
    if process.host == 0:
        return process
    environment = {**process.environment, "GLOO_SOCKET_IFNAME": NAMESPACES[0]}
    command = (*_western(), *process.command)
    return replace(process, host=0, command=command, environment=environment)


def _western() -> tuple[str, ...]:
    return ("ip", "netns", "exec", NAMESPACES[0])


def _western_redis(folder: Path) -> Child:
    """What weights service and scheduler remember; it must not be beyond the link."""
    own = folder / "western_redis"
    own.mkdir()
    command = [*_western(), find_redis_server(), "--port", str(_OWN_REDIS), "--dir", str(own)]
    return Child("redis", [*command, "--save", "", "--bind", "127.0.0.1"], own, environment())


async def _trained(run: Run, finish: Path) -> Mapping[str, object]:
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(_end(run, finish))
        summary = await run.train()
        ending.cancel()
    return summary


async def _end(run: Run, finish: Path) -> None:
    """Make the step in progress the last one as soon as the file is there.

    Rollouts that the end of the run cuts off have failed, too, so failures are counted before.
    """
    while not await asyncio.to_thread(finish.exists):
        await asyncio.sleep(_LOOK_SECONDS)
    layout = run.layout
    async with connected(run.config, layout) as services:
        stored = [each async for each in trajectories(services, headers_only=True)]
    failed = sum(each.HasField("failure") for each in stored)
    await asyncio.to_thread((layout.folder / FAILED).write_text, str(failed))
    own = hosts_folder(layout) / "0" / "operator"
    ca, cert, key = (own / f"{part}.pem" for part in ("ca", "cert", "key"))
    credentials = Credentials(ca_file=ca, cert_file=cert, key_file=key)
    async with connect(layout.address("trainer"), credentials) as channel:
        stub = async_stub(TrainerServiceStub, channel)
        await retrying(lambda: stub.FinishTraining(trainer_pb.FinishTrainingRequest()))


if __name__ == "__main__":
    main()
