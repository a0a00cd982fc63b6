"""Small makers for launcher tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, free_ports


def make_config(**changes: Any) -> LauncherConfig:
    """A valid configuration, with some fields changed."""
    fields = {"name": "run", "model": "{run}/model", "tasks": "t.jsonl", "agent": "a:B", **changes}
    return LauncherConfig(**fields)


def make_layout(config: LauncherConfig, folder: Path) -> Layout:
    """Where a run in `folder` would live."""
    return Layout(
        folder=folder,
        run_id=config.name,
        config_file=folder / "run.toml",
        ports=free_ports(config),
        redis_url="redis://127.0.0.1:1",
    )


def make_turn(*spans: tuple[list[int], int, str], turn_id: str = "turn") -> trajectory_pb2.Turn:
    """A finished turn: two prompt tokens, then spans of (ids, weight version, server)."""
    turn = trajectory_pb2.Turn(turn_id=turn_id, finish_reason=tokens_pb2.FINISH_REASON_STOP)
    turn.tokens.token_ids.extend([1, 2])
    turn.tokens.spans.add(start=0, num_tokens=2, origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    for ids, version, server in spans:
        turn.tokens.spans.add(
            start=len(turn.tokens.token_ids),
            num_tokens=len(ids),
            origin=tokens_pb2.ORIGIN_POLICY,
            weight_version=version,
            server_id=server,
        )
        turn.tokens.token_ids.extend(ids)
    return turn


def make_trajectory(*turns: trajectory_pb2.Turn, **changes: object) -> trajectory_pb2.Trajectory:
    """A finished training rollout of these turns."""
    fields = {
        "rollout_id": "rollout",
        "group_id": "task@0",
        "purpose": tokens_pb2.PURPOSE_TRAIN,
        "state": trajectory_pb2.ROLLOUT_STATE_FINISHED,
        **changes,
    }
    return trajectory_pb2.Trajectory(turns=turns, **fields)  # type: ignore[arg-type]
