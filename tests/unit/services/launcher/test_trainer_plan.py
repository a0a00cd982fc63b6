"""How the processes of the trainer are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.chassis.config.load import TABLES
from services.launcher.process_plan import plan
from services.lib.evaluation import EvaluationConfig
from tests.lib.launcher.support import make_config, make_layout


def test_several_training_nodes_have_a_trainer_each_and_a_rendezvous(tmp_path: Path) -> None:
    """Also a spare; each rank knows its node."""
    config = make_config(nodes=("a: rollout", "b: train", "c: train", "d: train"), trainer_nodes=2)
    processes = plan(config, make_layout(config, tmp_path))
    assert "rendezvous" in processes
    for node_id in "bcd":
        trainer = processes[f"trainer-{node_id}"]
        assert "--nnodes=2:2" in trainer.command
        assert trainer.environment["SEAMFLOW_TRAINER_GANG__NODE_ID"] == node_id
        assert trainer.environment["SEAMFLOW_TRAINER_GANG__NODES"] == "2"


def test_several_ranks_are_started_by_torchrun(tmp_path: Path) -> None:
    """World size 2 is a flag of torchrun, not another trainer."""
    config = make_config(trainer_ranks=2)
    command = plan(config, make_layout(config, tmp_path))["trainer"].command
    assert "torch.distributed.run" in command
    assert "--nproc-per-node=2" in command


def test_a_reference_is_scored_and_known_to_the_trainer(tmp_path: Path) -> None:
    """One folder: a service that scores by it, a column of the run, and the trainer's setting."""
    config = make_config(reference="{run}/teacher")
    layout = make_layout(config, tmp_path)
    processes = plan(config, layout)
    assert processes["scoring"].environment["SEAMFLOW_SCORING_MODEL"] == f"{tmp_path}/teacher"
    column = processes["scoring"].environment["SEAMFLOW_SCORING_COLUMN"]
    assert (
        processes["trainer"].environment["SEAMFLOW_TRAINER_ALGORITHM__REFERENCE_COLUMN"] == column
    )
    assert config.columns == (column,)
    assert "scoring" in TABLES, "its table may be in the run's file"
    plain = make_config()
    assert "scoring" not in plan(plain, make_layout(plain, tmp_path))
    assert plain.columns == ()


@pytest.mark.parametrize(
    ("evaluation", "text", "every"),
    [
        ({"every_steps": 20}, "", 10),
        ({"every_steps": 14}, "", 7),
        ({"every_steps": 2}, "", 2),
        ({"every_steps": 2}, "[trainer.checkpoint]\nevery = 6\n", None),
        ({"every_steps": 2, "keep_best": False}, "", None),
        ({}, "", None),
    ],
)
def test_each_evaluated_step_has_a_checkpoint(
    tmp_path: Path, evaluation: dict[str, bool | int], text: str, every: int | None
) -> None:
    """Unless the file says otherwise, or none is kept."""
    config = make_config()
    layout = make_layout(config, tmp_path)
    layout.config_file.write_text(text)
    trainer = plan(config, layout, EvaluationConfig(tasks="h.jsonl", **evaluation))["trainer"]
    given = trainer.environment.get("SEAMFLOW_TRAINER_CHECKPOINT__EVERY")
    assert given == (None if every is None else str(every))
