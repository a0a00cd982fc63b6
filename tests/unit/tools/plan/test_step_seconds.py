"""Seconds of a step by rooflines, against closed forms."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.server.config import RolloutServerConfig
from services.node_agent.known_devices import device
from tests.lib.trainer.support import trainer_config
from tools.plan.cures import Cure
from tools.plan.engine_size import EngineSize
from tools.plan.plan_command import OFF, engine_lines, host_lines, time_lines
from tools.plan.run_shape import Lengths, RunShape
from tools.plan.step_seconds import SHARE_BANDWIDTH, SHARE_FLOPS, step_seconds
from tools.plan.training_count import TrainingCount

ROOT = Path(__file__).parents[4]
H100 = device("h100-80")
SIZE = EngineSize(
    parameters=10**9,
    expert_parameters=0,
    embedding_parameters=0,
    experts=0,
    experts_per_token=0,
    kv_bytes=10_000,
)
COUNT = TrainingCount(
    by_part={"weights": 10**9},
    host_bytes=0,
    flops=10**16,
    tokens=10_000,
    parameters=10**9,
    trained=10**9,
    exchanged_bytes=0,
)
SHAPE = RunShape(
    trainer=trainer_config(
        run_id="r", model=Path("m"), checkpoint__folder=Path("c"), dtype="bfloat16"
    ),
    rollout=RolloutServerConfig(engine="sglang", max_running=16),
    nodes=(("train",), ("rollout",)),
    trainer_nodes=1,
    ranks_per_node=1,
    group_size=4,
    groups_per_step=4,
    max_staleness=1,
    lengths=Lengths(longest=2000, mean=1000, prompt=100),
)


def test_training_is_its_operations_over_what_the_device_attains() -> None:
    """16,000 tokens of 1e12 operations each, and an update that the device hardly notices."""
    found = step_seconds(SHAPE, COUNT, SIZE, H100)
    assert found.training == pytest.approx(1.6e16 / (SHARE_FLOPS * H100.flops), rel=0.01)
    assert found.traffic == 0


def test_generation_is_its_bytes_over_the_bandwidth() -> None:
    """900 steps that each read the weights and 16 caches of 550 tokens on average."""
    found = step_seconds(SHAPE, COUNT, SIZE, H100)
    step = (2e9 + 16 * 10_000 * 550) / (SHARE_BANDWIDTH * H100.bandwidth)
    assert found.generation == pytest.approx(900 * step, rel=0.05)


def test_the_slower_part_sets_the_pace_unless_training_waits() -> None:
    """With staleness the parts go on side by side; without, one after the other, with the tail."""
    side = step_seconds(SHAPE, COUNT, SIZE, H100)
    assert side.step == pytest.approx(max(side.training + side.publish, side.generation))
    waits = step_seconds(replace(SHAPE, max_staleness=0), COUNT, SIZE, H100)
    assert waits.step == pytest.approx(waits.training + waits.publish + waits.generation)
    assert waits.tail > side.tail == 0
    assert waits.idle > side.idle


def test_ranks_that_share_tokens_compute_the_same_in_a_step_and_wait_for_exchanges() -> None:
    """Each has half of the operations of twice as many micro-batches, between devices of a node."""
    pair = SHAPE.changed(SHAPE.trainer.model_copy(update={"context_parallel": 2}), 2)
    halves = replace(COUNT, flops=COUNT.flops // 2, exchanged_bytes=10**11)
    apart = step_seconds(SHAPE.changed(SHAPE.trainer, 2), COUNT, SIZE, H100)
    found = step_seconds(pair, halves, SIZE, H100)
    assert found.exchange == pytest.approx(1.6 * 1e11 / (0.7 * H100.link))
    assert apart.exchange == 0
    assert found.training == pytest.approx(apart.training + found.exchange, rel=0.01)
    between = replace(pair, trainer_nodes=2, ranks_per_node=1)
    assert step_seconds(between, halves, SIZE, H100).exchange > found.exchange


def test_half_precision_is_what_makes_training_fast() -> None:
    """float32 has its own peak, far lower."""
    wide = SHAPE.changed(SHAPE.trainer.model_copy(update={"dtype": "float32"}), 1)
    ratio = H100.flops / H100.float32_flops
    slow, fast = (step_seconds(each, COUNT, SIZE, H100).training for each in (wide, SHAPE))
    assert slow == pytest.approx(ratio * fast, rel=0.01)


def test_more_ranks_gather_weights() -> None:
    """2 bytes twice and 4 once for each parameter and micro-batch, over half of the ranks."""
    pair = SHAPE.changed(SHAPE.trainer, 2)
    found = step_seconds(pair, COUNT, SIZE, H100)
    assert found.traffic == pytest.approx(8e9 / 2 / (0.7 * H100.link), rel=0.01)


def test_servers_of_one_node_generate_as_fast_as_those_of_several() -> None:
    """And a step takes no longer; *control*: one server alone takes longer."""
    quick = replace(COUNT, flops=10**13)
    one = step_seconds(SHAPE, quick, SIZE, H100)
    shared = step_seconds(replace(SHAPE, servers_per_node=4), quick, SIZE, H100)
    nodes = (("train",), *[("rollout",)] * 4)
    apart = step_seconds(replace(SHAPE, nodes=nodes), quick, SIZE, H100)
    assert shared.generation == apart.generation < one.generation
    assert shared.step == pytest.approx(apart.step)


def test_an_offloaded_state_comes_over_pcie_and_is_updated_by_the_cpu() -> None:
    """Weights of 4 bytes twice, gradients once, for each of two micro-batches; it may not hide."""
    there = {"cpu_offload": True}
    hosted = SHAPE.changed(SHAPE.trainer.model_copy(update=there), 1)
    plain, found = (step_seconds(each, COUNT, SIZE, H100) for each in (SHAPE, hosted))
    assert plain.offload == 0
    assert found.offload == pytest.approx(2 * 12e9 / (0.7 * H100.host_link))
    assert found.update == pytest.approx(2 * 16e9 / (SHARE_BANDWIDTH * H100.host_link))
    assert found.training - found.update == pytest.approx(plain.training - plain.update)
    slow = replace(H100, host_link=H100.host_link / 100)
    late = step_seconds(hosted, COUNT, SIZE, slow)
    assert late.training == pytest.approx(late.offload + late.update)
    assert step_seconds(SHAPE, COUNT, SIZE, slow).training == pytest.approx(plain.training)
    halves = step_seconds(hosted.changed(hosted.trainer, 2), COUNT, SIZE, H100)
    assert halves.update == pytest.approx(found.update / 2)


def test_a_device_is_known_by_its_numbers() -> None:
    """In GiB, TFLOP/s and GB/s; links that are not given are as fast as PCIe."""
    found = device("memory=24,tflops=165.2,bandwidth=1008,pcie=32")
    assert (found.memory_bytes, found.flops, found.bandwidth) == (24 << 30, 165.2e12, 1008e9)
    assert (found.host_link, found.link, found.network, found.price) == (32e9, 32e9, 32e9, 0)
    assert device(f"{found.name},link=600,price=2").link == 600e9


@pytest.mark.parametrize(
    "text",
    ["memory=24", "memory=24,tflops=1,bandwidth=1,pcie=0", "memory=x", "pcie=inf", "a=1", "="],
)
def test_wrong_numbers_of_a_device_are_named_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{text}': give numbers: memory=24,tflops=165,"):
        device(text)


def test_rollouts_that_do_not_fit_at_a_time_wait() -> None:
    """A warning; what holds not one of the longest does not fit."""
    lines = "\n".join(engine_lines(SHAPE, replace(SIZE, kv_bytes=10**7), H100))
    assert "more than fits at a time" in lines and "warning: 3 of the longest" in lines
    assert "DOES NOT FIT" not in lines
    assert "DOES NOT FIT" in "\n".join(engine_lines(SHAPE, replace(SIZE, kv_bytes=10**8), H100))
    assert "warning" not in "\n".join(engine_lines(SHAPE, SIZE, H100))
    assert "fits: " in list(engine_lines(SHAPE, SIZE, H100))[-1]


@pytest.mark.parametrize(
    ("memory", "said"),
    [(100, "fits: a machine has 107.4"), (50, "DOES NOT FIT"), (None, "give --host-memory")],
)
def test_host_memory_of_a_machine_is_that_of_its_ranks(memory: float | None, said: str) -> None:
    hosted = replace(COUNT, host_bytes=30 * 10**9)
    cure = Cure(settings={}, shape=SHAPE.changed(SHAPE.trainer, 2), count=hosted)
    _, line = host_lines(cure, memory)
    assert "60.00" in line and said in line
    assert list(host_lines(replace(cure, count=COUNT), memory)) == []


def test_a_forecast_says_how_much_it_was_off() -> None:
    """By the published steps of the page; the longest rollouts are told where they go on alone."""
    table = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| (\d+\.\d) \| (\d+\.\d) \| [-+]\d+% \|$", table, re.MULTILINE)
    ratios = sorted(float(published) / float(forecast) for published, forecast in rows)
    assert len(ratios) == 6
    assert (round(ratios[0], 1), round(ratios[-1], 1)) == OFF
    seconds = step_seconds(SHAPE, COUNT, SIZE, H100)
    lines = "\n".join(time_lines(seconds))
    assert "a lower bound" in lines and "took 1.1 to 2.0 times" in lines
    assert "the longest" not in lines
    assert "of it 3.0 when only the longest go on" in "\n".join(
        time_lines(replace(seconds, tail=3.0))
    )
