"""A run goes on from the checkpoint before a damaged one."""

from __future__ import annotations

from tests.lib.trainer.rejection.poisons import GOOD, record
from tests.lib.trainer.training import Training
from tests.unit.trainer.checkpoint.test_damage import flip


async def test_a_damaged_checkpoint_is_gone_past_and_told(training: Training) -> None:
    """The run goes on from the one before, on new groups, and says so."""
    await training.begin(max_staleness=9)
    made = [GOOD(f"t{number}") for number in range(9)]
    await training.client.trajectories.RecordGroups(record(training.client.run_id, *made))
    await training.train(2)
    shard = training.checkpoints / "step_000000002" / "rank_00000_of_00001.safetensors"
    flip(shard, 8 * shard.stat().st_size - 2)
    async with training.service(2, optimizer__learning_rate=1e-3) as trainer:
        await trainer.background[0]()
        alarms = trainer.servicers[0][1]._trainer.alarms.texts
    damaged, undone, changed = alarms
    assert shard.name in damaged
    assert "steps 2 to 2 are trained on new groups" in undone
    assert changed == "it resumed with other settings: optimizer.learning_rate 0.003 → 0.001"
    assert [each["step"] for each in training.records()] == [1, 2]
