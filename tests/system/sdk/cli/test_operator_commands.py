"""Commands that change or plan something, as processes against the real servicers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from seamflow.channel import connect
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_server_service_pb2_grpc as server_grpc
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from seamflow.trajectory.v1 import trajectory_pb2

from rollout.server.cli import build
from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import Service, started
from tests.lib.ranker.support import group, manager, record, turn
from tests.lib.rollout.server.client import fake_config
from tests.lib.scheduler.support import running_scheduler
from tests.lib.sdk.support import serving
from tests.lib.trajectory_manager.client import RULES, Client, running_manager
from tests.system.sdk.cli.test_main import NOBODY, seamflow
from trainer.servicer import TrainerServicer


async def test_the_pool_is_planned_and_shared(tmp_path: Path) -> None:
    """Commands ask the scheduler and say what it answers; no node ends while they start."""
    async with running_scheduler(lease_seconds=3600) as (port, stub):
        for name in ("a", "b"):
            await stub.RegisterNode(
                pb.RegisterNodeRequest(
                    node_id=name, run_id="demo", capability_tags=["rollout", "train"]
                )
            )

        async def command(*arguments: str) -> str:
            flags = ("--scheduler", f"127.0.0.1:{port}", "--run", "demo")
            code, out, err = await seamflow(*arguments, *flags, cwd=tmp_path)
            assert (code, err) == (0, "")
            return out

        plan = await command("pool", "--gang", "g")
        assert plan.endswith(" would change to train\n")
        plan = await command("pool", "--gang", "g", "--nodes", "9")
        assert plan.startswith("gang g of run demo would wait: ")
        set_to = await command("set-policy", "--priority", "2", "--max-nodes", "7")
        assert set_to == "run demo: priority 2, at most 7 nodes, rollout share 1\n"
        assert (
            await command("pool")
            == "demo  2 rollout; priority 2, at most 7 nodes, rollout share 1\n"
        )


async def test_wrong_arguments_name_the_cure(tmp_path: Path) -> None:
    """Exit code 64 before any call."""
    code, _, err = await seamflow("set-policy", cwd=tmp_path)
    assert (code, "--run is missing" in err) == (64, True)


class Server(server_grpc.RolloutServerServiceServicer):
    """Loads any version; the newest is 9."""

    async def UpdateWeights(self, request: Any, context: Any) -> Any:
        """At once."""
        version = request.weight_version if request.HasField("weight_version") else 9
        return server_pb.UpdateWeightsResponse(weight_version=version)


async def test_a_rollout_server_loads_weights_on_demand(tmp_path: Path) -> None:
    """The newest or the named version; a server without a weights service says so."""
    add = server_grpc.add_RolloutServerServiceServicer_to_server
    async with serving((add, Server())) as address:
        _, newest, _ = await seamflow("update-weights", address, cwd=tmp_path)
        _, named, _ = await seamflow("update-weights", address, "--version", "3", cwd=tmp_path)
    assert newest == f"rollout server {address} serves v9\n"
    assert named == f"rollout server {address} serves v3\n"
    config = fake_config()
    async with build(config) as service, started(service, config) as port:
        code, _, err = await seamflow("update-weights", f"127.0.0.1:{port}", cwd=tmp_path)
    assert (code, "no weights service" in err) == (69, True)
    code, _, err = await seamflow("update-weights", NOBODY, cwd=tmp_path)
    assert (code, f"rollout server at {NOBODY} does not answer" in err) == (69, True)


@pytest.mark.parametrize("step", [0, 4])
async def test_a_trainer_checkpoints_on_demand(tmp_path: Path, step: int) -> None:
    """It answers with the step, or that there is none yet."""

    async def save_checkpoint() -> int:
        return step

    loop = SimpleNamespace(progress=SimpleNamespace(step=step), save_checkpoint=save_checkpoint)
    servicer = TrainerServicer(*(cast(Any, part) for part in (None, loop, None, None, None)))
    service = Service([(trainer_grpc.add_TrainerServiceServicer_to_server, servicer)])
    async with started(service, ServerConfig()) as port:
        code, out, err = await seamflow(
            "save-checkpoint", "--trainer", f"127.0.0.1:{port}", cwd=tmp_path
        )
    if step:
        assert (code, out) == (0, "checkpoint of step 4 is durable\n")
    else:
        assert (code, "no optimizer step is finished yet" in err) == (69, True)


async def test_columns_of_samples_are_listed(tmp_path: Path) -> None:
    """A line for each sample that waits for training."""
    async with manager("demo") as (address, stub):
        await record(stub, "demo", [group("t@0", [turn("a", [1, 2], 3)])])
        code, out, err = await seamflow(
            *("columns", "--run", "demo", "--trajectory-manager", address), cwd=tmp_path
        )
    assert (code, err) == (0, "")
    assert out.endswith("columns written: none\n")


async def test_a_run_is_listed_ended_and_deleted(tmp_path: Path) -> None:
    """Of a real trajectory manager; a run that still goes is not deleted."""
    async with running_manager() as port:

        async def command(*arguments: str) -> tuple[int, str, str]:
            flags = ("--trajectory-manager", f"127.0.0.1:{port}")
            return await seamflow(*arguments, *flags, cwd=tmp_path)

        async with connect(f"127.0.0.1:{port}") as channel:
            rules = trajectory_pb2.RunConfig(labels={"owner": "me"})
            rules.MergeFrom(RULES)
            await Client(channel, "demo").create_run(rules)
        code, out, _ = await command("runs")
        assert (code, out.startswith("demo  running, step 0, created ")) == (0, True)
        assert out.endswith("UTC  owner=me\n")
        code, _, err = await command("delete-run", "demo")
        assert code != 0
        assert "demo" in err
        assert await command("end-run", "demo") == (0, "run demo has ended\n", "")
        assert (await command("runs"))[1].startswith("demo  ended")
        deleted = await command("delete-run", "demo")
        assert deleted == (0, "run demo is deleted, with 0 rollouts\n", "")
        assert await command("runs") == (0, "", "")
