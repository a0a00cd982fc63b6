"""What the advice on the split of a run's nodes measures, over real calls."""

from __future__ import annotations

from seamflow.durations import seconds_of
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from tests.lib.scheduler.support import RUN, register, running_scheduler
from tests.unit.scheduler.policy.test_split_advice import BATCHES


async def test_a_run_over_the_wire_is_measured() -> None:
    """Real calls, real time: what a trainer asks and gives back is enough."""
    async with running_scheduler() as (_, stub):
        await register(stub, "r", "rollout")
        epoch = (await register(stub, "t", "train")).epoch
        ask = pb.RequestNodesRequest(run_id=RUN, gang_id="g", tag="train", num_nodes=1)
        give = pb.ReleaseNodesRequest(
            run_id=RUN,
            gang_id="g",
            forecast=pb.GenerationForecast(remaining_rollouts=1, batch_rollouts=2),
        )
        for _ in range(BATCHES + 1):
            epoch = (await stub.RequestNodes(ask)).nodes[0].assignment.epoch
            await stub.Heartbeat(
                pb.HeartbeatRequest(
                    node_id="t",
                    state=pb.NODE_STATE_ACTIVE,
                    reported_epoch=epoch,
                    known_epoch=epoch,
                )
            )
            await stub.ReleaseNodes(give)
        (run,) = (await stub.ListRuns(pb.ListRunsRequest())).runs
    (balance,) = run.stage_times
    assert (balance.gang_id, balance.num_generation_nodes, balance.num_training_nodes) == (
        "g",
        1,
        1,
    )
    seconds = seconds_of(balance.generation_duration), seconds_of(balance.training_duration)
    assert seconds[0] >= seconds[1] > 0
    assert balance.advice in (pb.SPLIT_ADVICE_KEEP, pb.SPLIT_ADVICE_ADD_GENERATION)
