"""The audit finds what it is there to find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.report.summary import Audit, audit, audit_figures, read_token_log
from tests.lib.launcher.support import make_trajectory, make_turn


def write_log(file: Path, *chunks: tuple[int, list[int], int]) -> Path:
    """A token log of one turn: chunks of (offset, ids, weight version)."""
    lines = [
        json.dumps(
            {
                "rollout_id": "rollout",
                "turn_id": "turn",
                "offset": offset,
                "token_ids": ids,
                "spans": [[0, len(ids), version, "server"]],
            }
        )
        for offset, ids, version in chunks
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def found(file: Path, *spans: tuple[list[int], int, str]) -> Audit:
    """Hold a log against one stored turn."""
    return audit(read_token_log(file), [make_trajectory(make_turn(*spans))])


def test_equal_log_and_store_are_clean(tmp_path: Path) -> None:
    """Two chunks of two versions, stored as received."""
    log = write_log(tmp_path / "log", (0, [7, 8], 1), (2, [9], 2))
    assert found(log, ([7, 8], 1, "a"), ([9], 2, "a")) == Audit(num_received=3)


@pytest.mark.parametrize(
    ("chunks", "spans", "expected"),
    [
        ([(0, [7, 8], 1)], [([7], 1, "a")], Audit(num_received=2, num_lost=1)),
        ([(0, [7, 8], 1)], [([7, 9], 1, "a")], Audit(num_received=2, num_lost=1)),
        ([(0, [7], 1), (0, [7], 1)], [([7], 1, "a")], Audit(num_received=1, num_duplicated=1)),
        ([(0, [7], 1)], [([7, 7], 1, "a")], Audit(num_received=1, num_duplicated=1)),
        ([(0, [7], 1)], [([7], 2, "a")], Audit(num_received=1, num_wrong_version=1)),
    ],
    ids=["missing", "different", "received twice", "stored twice", "other version"],
)
def test_each_kind_of_damage_is_counted(
    tmp_path: Path,
    chunks: list[tuple[int, list[int], int]],
    spans: list[tuple[list[int], int, str]],
    expected: Audit,
) -> None:
    """Negative controls: a damaged store or log is never clean."""
    assert found(write_log(tmp_path / "log", *chunks), *spans) == expected


def test_the_rest_of_an_abandoned_turn_is_no_duplicate(tmp_path: Path) -> None:
    """Tokens are recorded before the agent gets them: one that was stopped got fewer."""
    log = read_token_log(write_log(tmp_path / "log", (0, [7], 1)))
    turn, failed = make_turn(([7, 8], 1, "a")), trajectory_pb2.ROLLOUT_STATE_FAILED
    assert audit(log, [make_trajectory(turn, state=failed)]) == Audit(num_received=1)
    assert audit(log, [make_trajectory(turn)]).num_duplicated == 1


def test_all_tokens_of_an_unknown_turn_are_lost(tmp_path: Path) -> None:
    """A turn the store has never heard of."""
    log = write_log(tmp_path / "log", (0, [7, 8], 1))
    assert audit(read_token_log(log), []).num_lost == 2


def test_an_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    """A killed runner may leave half a line: it had not acted upon it."""
    log = write_log(tmp_path / "log", (0, [7], 1))
    log.write_text(log.read_text() + '{"rollout_id": "roll')
    assert found(log, ([7], 1, "a")).num_received == 1


def test_an_agent_without_a_log_is_not_audited(tmp_path: Path) -> None:
    """Then nothing is said of lost tokens; with a log the damage is."""
    stored = [make_trajectory(make_turn(([7], 1, "a")))]
    unknown = audit_figures(tmp_path / "none", stored)
    assert unknown.pop("token_audit").startswith("not audited")
    assert set(unknown.values()) == {None}
    known = audit_figures(write_log(tmp_path / "log", (0, [7, 8], 1)), stored)
    assert (known["token_audit"], known["tokens_lost"]) == ("done", 1)
    assert known.keys() == {"token_audit", *unknown}
