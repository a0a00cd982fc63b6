"""The checker of `make chaos-store`, on histories made up to hold what it must find."""

from __future__ import annotations

from pathlib import Path

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from bench.report import percentile
from tests.chaos.calls import tokens_of
from tests.chaos.store.checker import (
    Verdict,
    check_steps,
    check_tokens,
    stored_tokens,
    untrained_groups,
)
from tests.chaos.store.history import History, Log, new_acks, read_history
from tests.chaos.store.processes import unfenced_manager
from tests.chaos.store.processes.modelless_trainer import committed_steps, save
from trajectory_manager.store.redis.connect import SCRIPTS

TURN = ("task/0/1", "turn-0")


def acknowledged(path: Path, *chunks: tuple[int, list[int]]) -> History:
    """A history of appends of one turn, each an offset and its ids."""
    log = Log(path)
    for offset, ids in chunks:
        log.write(
            "tokens",
            rollout_id=TURN[0],
            turn_id=TURN[1],
            offset=offset,
            ids=ids,
            sent=1.0,
            received=2.0,
        )
    log.close()
    return read_history(path)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a history goes."""
    return tmp_path / "acks.jsonl"


@pytest.mark.parametrize(
    ("stored", "lost", "duplicated"),
    [
        ([1, 2, 3, 4], 0, 0),
        ([1, 2, 3, 4, 5], 0, 0),  # written, and never acknowledged
        ([1, 2, 3], 1, 0),
        ([], 4, 0),
        ([1, 2, 9, 4], 1, 0),
        ([1, 2, 1, 2, 3, 4], 2, 2),
        ([1, 2, 3, 4, 3, 4], 0, 2),
    ],
)
def test_planted_losses_and_duplicates_are_counted(
    log: Path, stored: list[int], lost: int, duplicated: int
) -> None:
    """Every acknowledged token must be in its place, and no token twice."""
    history = acknowledged(log, (0, [1, 2]), (2, [3, 4]))
    verdict = check_tokens(history, {TURN: stored})
    found = (verdict.tokens_acked, verdict.tokens_lost, verdict.tokens_duplicated)
    assert found == (4, lost, duplicated)
    assert verdict.violations == lost + duplicated


def test_a_prefix_that_is_stored_with_both_turns_is_a_duplicate(log: Path) -> None:
    """Turns of one rollout share what they have in common."""
    stored = {TURN: [1, 2], (TURN[0], "turn-1"): [1, 2, 3]}
    assert check_tokens(acknowledged(log, (0, [1, 2])), stored).tokens_duplicated == 2


def test_a_loss_that_was_sampled_anew_is_still_a_loss(log: Path) -> None:
    """Two acknowledgements of one place cannot both hold."""
    history = acknowledged(log, (0, [1, 2]), (1, [3]))
    assert check_tokens(history, {TURN: [1, 3]}).tokens_lost == 2


def test_a_token_with_another_logprob_is_lost(log: Path) -> None:
    """A token is its id and its log-prob together."""
    tokens = tokens_of([1, 2], tokens_pb2.ORIGIN_POLICY)
    turn = trajectory_pb2.Turn(turn_id=TURN[1], tokens=tokens)
    whole = trajectory_pb2.Trajectory(rollout_id=TURN[0], turns=[turn])
    history = acknowledged(log, (0, [1, 2]))
    assert check_tokens(history, stored_tokens([whole])).violations == 0
    whole.turns[0].tokens.logprobs[1] = -0.75
    assert check_tokens(history, stored_tokens([whole])).tokens_lost == 1


def test_a_torn_line_was_never_acted_upon(log: Path) -> None:
    """A control kills the writer of the log itself."""
    acknowledged(log, (0, [1]))
    with log.open("a") as file:
        file.write('{"event": "tokens", "offs')
    assert read_history(log).tokens[TURN] == {0: 1}
    acks, read = new_acks(log, 0)
    assert [ack.received for ack in acks] == [2.0]
    assert new_acks(log, read) == ([], read)


def test_a_sample_in_two_steps_is_counted(tmp_path: Path) -> None:
    """What two durable checkpoints name was trained twice."""
    save(tmp_path, 1, ["a", "b"])
    save(tmp_path, 2, ["c", "a"])
    verdict = check_steps(committed_steps(tmp_path))
    assert (verdict.samples_committed, verdict.samples_committed_twice) == (3, 1)


def test_a_finished_group_that_no_step_trained_is_lost() -> None:
    """Unless it still waits for a step, or one of its samples is not finished."""
    finished = ["a/0/1", "a/1/1", "b/0/1", "b/1/2", "c/0/1"]
    assert untrained_groups(finished, ["a/0/1", "a/1/1"], 2, still_stored=0).samples_lost == 2
    assert untrained_groups(finished, ["a/0/1", "a/1/1"], 2, still_stored=1).samples_lost == 0
    assert untrained_groups(finished, ["a/0/1", "b/0/1"], 2, still_stored=0).samples_lost == 0


def test_verdicts_add_up() -> None:
    """The figures are those of all scenarios together."""
    total = Verdict(tokens_lost=1, tokens_acked=5) + Verdict(stale_writes_accepted=2)
    assert (total.tokens_lost, total.stale_writes_accepted, total.violations) == (1, 2, 3)


def test_a_percentile_is_one_of_the_samples() -> None:
    """19 of 20 are 95 of 100."""
    assert percentile([float(i) for i in range(20)], 0.95) == 18.0
    assert percentile([7.0], 0.95) == 7.0


def test_the_control_takes_the_fence_out_of_the_scripts(tmp_path: Path) -> None:
    """Only the append differs in its fence, and nothing else is changed."""
    folder = unfenced_manager.unfenced_scripts(tmp_path / "lua")
    source, changed = ((root / "append_tokens.lua").read_text() for root in (SCRIPTS, folder))
    assert "STALE_TURN" in source
    assert source != changed
    assert {path.name for path in folder.iterdir()} == {p.name for p in SCRIPTS.glob("*.lua")}


def test_the_control_says_when_it_would_prove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that fences in another way must not pass for one without a fence."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "append_tokens.lua").write_text("return redis.call('APPEND', KEYS[1], ARGV[1])")
    monkeypatch.setattr(unfenced_manager, "SCRIPTS", scripts)
    with pytest.raises(RuntimeError, match=r"append_tokens\.lua has no line like"):
        unfenced_manager.unfenced_scripts(tmp_path / "lua")
