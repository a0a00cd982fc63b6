"""The rules of a run as its file gives them."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.json_format import MessageToDict
from seamflow.trajectory.v1.trajectory_pb2 import RunConfig

from deploy.create_run import CreateRunConfig
from services.chassis.config.load import load
from services.launcher.run_rules import rules

EVERYTHING = """
[run]
run_id = "r"
staleness_policy = "wait"
publish_wait_seconds = 5.0
durability = "replicated"
zero_variance_reward = "reward"
num_extra_samples = 2
fifo_window = 32
required_columns = ["ref_logprobs"]
max_deliveries = 3
max_stored_tokens = 1000000
retention_steps = 10
reward_name = "reward"
labels = { team = "agents" }
replay_strategy = "reward"
replay_capacity_groups = 64
replay_groups_per_step = 4
replay_reward_name = "reward"
replay_temperature = 0.5
"""


def test_every_rule_of_a_run_can_be_set(tmp_path: Path) -> None:
    """No field of RunConfig needs a program of one's own."""
    file = tmp_path / "run.toml"
    file.write_text(EVERYTHING)
    given = rules(load(CreateRunConfig, "run", ["--config", str(file)]))
    assert {field.name for field, _ in given.ListFields()} == set(
        RunConfig.DESCRIPTOR.fields_by_name
    )
    assert MessageToDict(given.replay, preserving_proto_field_name=True) == {
        "strategy": "REPLAY_STRATEGY_REWARD",
        "capacity_groups": 64,
        "groups_per_step": 4,
        "reward_name": "reward",
        "temperature": 0.5,
    }


def test_replay_is_off_by_default(tmp_path: Path) -> None:
    """The rules of a plain run name no replay."""
    file = tmp_path / "run.toml"
    file.write_text('[run]\nrun_id = "r"\n')
    assert not rules(load(CreateRunConfig, "run", ["--config", str(file)])).HasField("replay")
