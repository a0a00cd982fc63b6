"""What a release stores, the one before and the one after can read.

A reader ignores fields that it does not know, and fields added since 0.2.0 have defaults.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from seamflow.cli import export
from seamflow.enum_names import enum_name
from seamflow.inspect.endpoints import SERVICES, resolve
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

from rollout.server.weights.transport import MANIFEST, LocalVersion
from scheduler.model import lending_state, records, stage_balance
from scheduler.store import redis_store as codec
from services.dataloader.loader import Position, PositionFile
from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.checkpoint_files import Checkpoint
from trajectory_manager.model import records as manager_records
from trajectory_manager.model import runs
from trajectory_manager.model import tokens as manager_tokens

NEW: Mapping[str, Any] = {"field_of_2027": {"a": [1]}}


REQUIRED: Mapping[type, set[str]] = {
    Checkpoint: {"run_id", "step", "weight_version", "world_size", "settings", "record"},
    Position: {"source"},
    export.Progress: {"run_id", "committed_only"},
    records.Node: {"node_id", "run_id", "capability_tags"},
    records.Gang: {"run_id", "gang_id", "tag", "num_nodes"},
    records.AllocationEvent: {"sequence", "time", "kind", "cause"},
    records.RunPolicy: set(),
    records.Assignment: set(),
    records.Worker: {"tag", "address"},
    records.Hardware: set(),
    lending_state.LendingState: set(),
    lending_state.DecayedMean: set(),
    lending_state.BatchForecast: {"remaining_rollouts", "batch_rollouts"},
    stage_balance.StageBalance: set(),
    stage_balance.BatchTimes: {"node_counts", "waited", "trained"},
    stage_balance.NodeCounts: {"generating", "training"},
    runs.RunConfig: {
        "group_size",
        "groups_per_step",
        "max_staleness",
        "staleness_policy",
        "lease_seconds",
        "zero_variance_reward",
        "durability",
    },
    runs.Replay: {"strategy", "capacity_groups", "groups_per_step"},
    manager_records.Task: {"task_id", "payload_json", "num_samples", "purpose"},
    manager_records.Outcome: set(),
    manager_records.Reward: {"name", "value"},
    manager_tokens.Turn: {"turn_id", "attempt_id", "prompt_digest"},
}
"""By stored record, the fields that release 0.2.0 always writes."""


def newer(text: str | bytes) -> str:
    """A JSON object with a field that this release does not know."""
    return json.dumps({**json.loads(text), **NEW})


@pytest.mark.parametrize("record", REQUIRED, ids=lambda record: record.__name__)
def test_fields_added_since_0_2_0_have_defaults(record: Any) -> None:
    """A record of the release before has no value for them."""
    none = MISSING
    required = {e.name for e in fields(record) if e.default is none and e.default_factory is none}
    assert required == REQUIRED[record]


def test_checkpoint(tmp_path: Path) -> None:
    """state.json: a newer trainer's, and one without all that has a default."""
    stored = Checkpoint(
        run_id="r", step=3, weight_version=3, world_size=1, settings={"seed": 0}, record={}
    )
    folder = tmp_path / "step_000000003"
    folder.mkdir()
    (folder / ".complete").touch()
    least = {name: asdict(stored)[name] for name in REQUIRED[Checkpoint]}
    for content in ({**asdict(stored), **NEW}, least):
        (folder / "state.json").write_text(json.dumps(content))
        assert checkpoint_files.newest(tmp_path) == (folder, stored)


def test_checkpoint_without_the_filter_is_an_error() -> None:
    """Negative control: what a trainer of 0.1.0 did, and never started again."""
    with pytest.raises(TypeError, match="field_of_2027"):
        Checkpoint(**{**dict.fromkeys(REQUIRED[Checkpoint]), **NEW})


def test_position_of_the_dataloader(tmp_path: Path) -> None:
    """dataloader.json."""
    file = PositionFile(tmp_path / "dataloader.json")
    position = Position(source="s", epoch=2, place=7, sizes={"a": 4})
    file.save(position)
    assert file.path is not None
    file.path.write_text(newer(file.path.read_text()))
    assert file.load(Position(source="s")) == position
    file.path.write_text(json.dumps({"source": "s"}))
    assert file.load(Position(source="s")) == Position(source="s")


def test_manifest_of_a_local_version(tmp_path: Path) -> None:
    """The cache of a node, which rollout servers of two releases may share."""
    (tmp_path / MANIFEST).write_text(newer('{"runId": "r", "weightVersion": "3"}'))
    version = LocalVersion.read(tmp_path)
    assert version is not None
    assert version.manifest.weight_version == 3


def test_nodes_and_events_of_the_scheduler() -> None:
    """In Redis, with a state and a kind that this release does not know."""
    worker = records.Worker(tag="train", address="x:1")
    node = records.Node(node_id="a", run_id="r", capability_tags=("train",), workers=(worker,))
    stored = newer(codec.encode(node)).encode()
    assert codec.decode(records.Node, stored) == node
    moved = json.dumps({**json.loads(stored), "state": "moved"}).encode()
    assert codec.decode(records.Node, moved) == replace(node, state=records.NodeState.LOST)
    event = records.AllocationEvent(
        sequence=1, time=2.0, node=node, kind=records.EventKind.ASSIGNED, cause="c"
    )
    told = json.dumps({**json.loads(codec.encode(event)), **NEW, "kind": "moved"}).encode()
    assert codec.decode(records.AllocationEvent, told) == replace(
        event, kind=records.EventKind.OTHER
    )
    gang = records.Gang(run_id="r", gang_id="g", tag="train", num_nodes=1, arrival=2)
    assert codec.decode(records.Gang, newer(codec.encode(gang)).encode()) == gang


def test_measurements_and_policies_of_the_scheduler() -> None:
    """In Redis."""
    policy, state = records.RunPolicy(), lending_state.LendingState()
    assert codec.decode(records.RunPolicy, newer(codec.encode(policy)).encode()) == policy
    assert codec.decode(lending_state.LendingState, newer(codec.encode(state)).encode()) == state
    balance = stage_balance.StageBalance()
    assert (
        codec.decode(stage_balance.StageBalance, newer(codec.encode(balance)).encode()) == balance
    )


def test_reason_of_a_dead_letter() -> None:
    """One that this release does not know."""
    reason = manager_records.DeadLetterReason(2027)
    assert reason is manager_records.DeadLetterReason.OTHER


def test_progress_of_an_export(tmp_path: Path) -> None:
    """export.json."""
    progress = export.Progress(run_id="r", committed_only=True, num_parts=3)
    (tmp_path / "export.json").write_text(newer(json.dumps(asdict(progress))))
    assert export.read_progress(tmp_path) == progress


def test_addresses_of_the_launcher(tmp_path: Path) -> None:
    """addresses.json, with a service that this release does not have."""
    addresses = {"run_id": "r", "trainer": "x:1", "service_of_2027": "x:2"}
    (tmp_path / "addresses.json").write_text(json.dumps(addresses))
    given = argparse.Namespace(
        run=None,
        run_folder=tmp_path,
        **dict.fromkeys(SERVICES),
        **dict.fromkeys(f"tls_{part}_file" for part in ("ca", "cert", "key")),
    )
    assert resolve(given, {}).services["trainer"] == "x:1"


def test_a_value_of_a_newer_contract_is_shown_as_its_number() -> None:
    """Operators see what an older command line does not know."""
    state = trainer_pb.TRAINER_STATE_FINISHED
    assert enum_name(trainer_pb.TrainerState, state) == "FINISHED"
    assert enum_name(trainer_pb.TrainerState, 2027) == "2027"
