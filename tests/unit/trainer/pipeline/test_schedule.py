"""Lists of actions: complete, planned with measured times, within the memory."""

from __future__ import annotations

import pytest

from trainer.config import PipelineConfig
from trainer.pipeline.fused_schedule.problem import BACKWARD, FORWARD
from trainer.pipeline.layout import POLICY, Layout, layout_of
from trainer.pipeline.schedule import Schedules

FUSED = PipelineConfig()


def schedules(layout: Layout, config: PipelineConfig = FUSED) -> Schedules:
    """With a fixed seed."""
    return Schedules(layout, config, seed=0)


@pytest.mark.parametrize("critic_stages", [0, 1, 2, 4])
@pytest.mark.parametrize("schedule", ["fused", "serial"])
def test_each_rank_does_every_task_of_its_stages_once(schedule: str, critic_stages: int) -> None:
    """Of seven micro-batches; replicas of the critic share them; forward before backward."""
    layout = layout_of(4, critic_stages)
    config = PipelineConfig.model_validate({"schedule": schedule})
    lists = schedules(layout, config).actions(7)
    for rank, actions in enumerate(lists):
        assert len(set(actions)) == len(actions)
        for model in layout.stages_on(rank):
            turn = (model - 1, layout.num_replicas) if model != POLICY else (0, 1)
            numbers = list(range(turn[0], 7, turn[1]))
            for kind in (FORWARD, BACKWARD):
                assert [j for m, k, j in actions if (m, k) == (model, kind)] == numbers
        for number in range(7):
            of_policy = [kind for m, kind, j in actions if (m, j) == (POLICY, number)]
            assert of_policy == [FORWARD, BACKWARD]


def test_measured_times_replace_the_assumed_ones() -> None:
    """After a warm-up; a rank that is slow is seen to be slow. One plan for each number."""
    layout = layout_of(2, 2)
    planned = schedules(layout)
    first = planned.actions(6)
    assert planned.actions(6) is first
    assert planned.problem(6).pipelines[0].forward == (1.0, 1.0)
    report = [
        {"0.0": 1.0, "0.1": 2.0, "1.0": 0.5, "1.1": 1.0},
        {"0.0": 4.0, "0.1": 8.0, "1.0": 0.25, "1.1": 0.5},
    ]
    planned.report([dict.fromkeys(each, 99.0) for each in report])  # the first is not typical
    for _ in range(3):
        assert planned.actions(6) is first
        planned.report(report)
    policy, critic = planned.problem(6).pipelines
    assert (policy.forward, policy.backward) == ((1.0, 4.0), (2.0, 8.0))
    assert (critic.nodes, critic.forward, critic.backward) == ((1, 0), (0.25, 0.5), (0.5, 1.0))
    again = planned.actions(6)
    assert again is not first
    planned.report(report)
    assert planned.actions(6) is again, "measured once"


def test_a_rank_holds_no_more_micro_batches_than_it_may() -> None:
    """Negative control: without the limit it holds more."""
    for held, most in ((2, 2), (0, 4)):
        config = PipelineConfig(micro_batches_held=held)
        worst = 0
        for actions in schedules(layout_of(4, 4), config).actions(12):
            now = 0
            for _, kind, _ in actions:
                now += 1 if kind == FORWARD else -1
                worst = max(worst, now)
        assert (worst <= most) == bool(held)


def test_a_critic_of_stages_that_do_not_divide_the_ranks_is_refused() -> None:
    """It names both."""
    with pytest.raises(ValueError, match="critic_stages is 3: give a number that divides the 4"):
        layout_of(4, 3)


def test_a_chunk_without_samples_has_no_actions() -> None:
    """The last one of a streamed step may have none."""
    assert schedules(layout_of(2, 2)).actions(0) == [(), ()]
