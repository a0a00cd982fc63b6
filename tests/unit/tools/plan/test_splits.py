"""The best split of a run's nodes, measured profiles, and Helm values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.policy.node_split import StageProfile, split_nodes
from services.chassis.errors import ConfigError
from services.node_agent.known_devices import device, devices
from tests.unit.tools.plan.test_step_seconds import COUNT, H100, SHAPE, SIZE
from tools.plan.run_shape import RunShape
from tools.plan.splits import Split, Splits, read_profiles, split_lines, write_values
from tools.plan.step_seconds import Measured

ROOT = Path(__file__).parents[4]
PROFILE = "[generation]\n8 = 500.0\n64 = 62.5\n[training]\n8 = 300\n64 = 37.5\n"
MEASURED = Measured(
    generation=StageProfile.of({8: 500.0, 64: 62.5}),
    training=StageProfile.of({8: 300.0, 64: 37.5}),
)


def splits(shape: RunShape = SHAPE, **fields: Any) -> Splits:
    """Of a run whose trainer's state fits any number of ranks."""
    given: dict[str, Any] = {"count": COUNT, "state": COUNT, "size": SIZE, "device": H100}
    return Splits(shape=shape, **{**given, **fields})


def all_splits(made: Splits, num_nodes: int) -> Iterator[Split]:
    """Every split in which no node does both, or every trainer does, one by one."""
    for tags in (("train",), ("rollout", "train")):
        for trainers in range(1, num_nodes + 1):
            for rollouts in range(num_nodes - trainers + 1):
                nodes = (tags,) * trainers + (("rollout",),) * rollouts
                if rollouts or "rollout" in tags:
                    yield made.of(replace(made.shape, nodes=nodes, trainer_nodes=trainers))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("weight", [0.2, 1.0, 5.0])
def test_no_split_is_faster_than_the_best(staleness: int, weight: float) -> None:
    """Against all of them, and of equals none has fewer nodes that generate alone."""
    count = replace(COUNT, flops=int(weight * COUNT.flops))
    made = splits(replace(SHAPE, max_staleness=staleness), count=count)
    best = min(made.best(6), key=lambda split: split.seconds.step)
    fastest = min(split.seconds.step for split in all_splits(made, 6))
    assert best.seconds.step == pytest.approx(fastest)


def test_measured_seconds_split_as_streamrl_does() -> None:
    """Alg. 1 on the same profile; the weights' transfer is all that is added."""
    best = splits(measured=MEASURED).best(64)[0]
    expected = split_nodes(MEASURED.generation.seconds, MEASURED.training.seconds, 64)
    assert best.shape.trainer_nodes == expected.training_nodes == 24
    assert best.shape.rollout_nodes == expected.generation_nodes == 40
    assert best.seconds.step == pytest.approx(expected.seconds, rel=0.01)


def test_what_is_given_back_makes_no_step_longer() -> None:
    """Generation that is faster than a trainer on all nodes but two needs few."""
    slow = replace(COUNT, flops=10**18)
    best = splits(replace(SHAPE, rollout=SHAPE.rollout), count=slow).best(16)[0]
    assert best.seconds.generation <= best.seconds.step
    assert len(best.shape.nodes) <= 16


def test_a_split_must_fit_the_devices() -> None:
    """Of 200 GB of state one rank cannot hold its part, four can; control: a small state."""
    state = replace(COUNT, by_part={"weights": 200 * 10**9})
    assert min(split.shape.trainer_nodes for split in splits(state=state).best(8)) >= 3
    assert list(splits(state=state).best(2)) == []
    assert splits().best(2)


def test_two_kinds_of_devices_share_no_node_and_have_their_prices() -> None:
    """H20s at 1.00 generate, H800s at 2.85 train."""
    trains, generates = device("h800-80"), device("h20-96")
    (best,) = splits(device=generates, train_device=trains, measured=MEASURED).best(64)
    hourly = best.shape.rollout_nodes * generates.price + best.shape.trainer_nodes * trains.price
    assert best.shape.shared_nodes == 0
    assert best.dollars == pytest.approx(hourly * best.seconds.step / 3600)


def test_a_line_for_each_split() -> None:
    """Its nodes and what a thousand steps cost; without one it is said."""
    made = splits()
    lines = list(split_lines(made.of(SHAPE), made.best(2), 1000))
    assert [line[2:20].strip() for line in lines[2:]] == [
        "as configured",
        "best, apart",
        "best, shared",
    ]
    assert lines[2].split()[2:5] == ["1", "1", "0"]
    assert "no split" in list(split_lines(made.of(SHAPE), [], 1000))[-1]


def pools(path: Path) -> dict[str, Any]:
    """Those of a written plan, each of which the chart has with the same keys."""
    chart = yaml.safe_load((ROOT / "deploy/helm/seamflow/values.yaml").read_text())["nodePools"]
    planned: dict[str, Any] = json.loads(path.read_text())["nodePools"]
    assert planned.keys() == chart.keys()
    assert all(values.keys() <= chart[name].keys() for name, values in planned.items())
    return planned


def test_a_trainer_of_several_nodes_is_several_pods(tmp_path: Path) -> None:
    """Which train together; each has the devices of its ranks. Settings of cures go along."""
    nodes = (("train",), ("train",), ("rollout",))
    shape = replace(SHAPE, nodes=nodes, trainer_nodes=2, ranks_per_node=8, servers_per_node=2)
    settings = {"trainer.batch.logit_tokens": "256", "launcher.trainer_ranks": "8"}
    write_values(tmp_path / "plan.json", shape, settings)
    assert pools(tmp_path / "plan.json") == {
        "train": {
            "enabled": True,
            "tags": ["train"],
            "gpus": 8,
            "replicas": 2,
            "trainerPods": 2,
        },
        "rollout": {"enabled": True, "tags": ["rollout"], "gpus": 2, "servers": 2, "replicas": 1},
    }
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["trainer"] == {"settings": {"batch": {"logit_tokens": 256}}}


def test_a_pool_without_nodes_is_switched_off(tmp_path: Path) -> None:
    """Nodes that do both are the only ones."""
    shape = replace(SHAPE, nodes=(("rollout", "train"),))
    write_values(tmp_path / "plan.json", shape, {})
    planned = pools(tmp_path / "plan.json")
    assert planned["rollout"] == {"enabled": False}
    assert (planned["train"]["tags"], planned["train"]["trainerPods"]) == (["rollout", "train"], 1)
    with pytest.raises(ConfigError, match="--values"):
        write_values(tmp_path / "nowhere" / "plan.json", shape, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "--profile"),
        ("[generation]\n8 = 1.0\n", "give at least one point"),
        (PROFILE + "[reward]\n8 = 1.0\n", "reward"),
        (PROFILE.replace("64 = 62.5", "sixty = 62.5"), "generation.sixty"),
        (PROFILE.replace("62.5", "620.5"), "more nodes must not be slower"),
    ],
)
def test_a_wrong_profile_is_named(text: str, message: str, tmp_path: Path) -> None:
    """File and place; control: the profile as it should be, with a byte order mark."""
    path = tmp_path / "profile.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as raised:
        read_profiles(path)
    assert message in str(raised.value)
    path.write_text(PROFILE, encoding="utf-8-sig")
    assert read_profiles(path) == MEASURED


def test_every_device_has_figures_of_its_order() -> None:
    """Read as the command reads them: bytes, FLOP/s, bytes a second, dollars."""
    for each in devices().values():
        assert each.usable_bytes < each.memory_bytes < 1e12
        assert each.float32_flops < each.flops < 1e16
        assert each.host_link <= each.network * 4
        assert each.network < each.bandwidth < 1e14
        assert 0 < each.price < 100
