"""A group's required weight version: from the trainer through the manager to the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb

from bench.harness.byte_model import make_byte_model
from tests.integration.rollout.gateway.test_gateway import ids_of
from tests.lib.rollout.gateway.support import ScriptedServer, bearer, gateway, scripted
from tests.lib.trajectory_manager.client import RULES
from tests.lib.trajectory_manager.memory.store import memory_store
from trajectory_manager.model.records import Purpose, Task
from trajectory_manager.store.redis.connect import Store


async def queued(store: Store, base: int) -> None:
    """A task for a step that starts from `base`, whose samples may be one version older."""
    task = Task(task_id="t", payload_json="{}", num_samples=2, purpose=Purpose.TRAIN)
    await store.runs.submit("run", [task], 10)
    epoch = (await store.ledger.reconcile("run", 0, "trainer")).epoch
    await store.ledger.await_step("run", epoch, 1, base)


@pytest.mark.parametrize(("base", "waits"), [(8, True), (1, False)])
async def test_a_turn_waits_for_a_server_with_its_required_weights(
    tmp_path: Path, base: int, waits: bool
) -> None:
    """The only one there is has older ones; the control: a group that any weights will do for."""
    server, store = ScriptedServer(), memory_store()
    server.answers = [[[7]]]
    async with (
        scripted(server) as address,
        gateway(make_byte_model(tmp_path), kept=store, servers=(address,)) as (stub, _, runs),
    ):
        await runs.CreateRun(run_pb.CreateRunRequest(run_id="run", config=RULES))
        await server.known()
        await queued(store, base)
        lease = pb.LeaseRolloutsRequest(run_id="run", request_id="one")
        (start,) = (await stub.LeaseRollouts(lease)).leases
        request = pb.GenerateRequest(
            run_id="run",
            rollout_id=start.rollout_id,
            turn_id="t",
            token_ids=pb.TokenIds(token_ids=[3, 4, 5]),
            sampling=tokens_pb2.SamplingParams(max_new_tokens=8),
        )
        request.heartbeat_interval.FromMilliseconds(20)
        call = stub.Generate(request, metadata=bearer(start.credential))
        if waits:
            for _ in range(8):
                event = await call.read()
                assert isinstance(event, pb.GenerateResponse)
                assert event.HasField("heartbeat")
            assert server.prompts == []
            server.weight_version = 7
        assert await ids_of(call) == [7]
