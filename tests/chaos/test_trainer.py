"""The checker of `make chaos-trainer`, on histories made up to hold what it must find."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.chaos.trainer.__main__ import broken, figures_of
from tests.chaos.trainer.checker import History, Verdict, check_delivery, check_recorded
from tests.chaos.trainer.controls import controls
from tests.chaos.trainer.gang import Gang, command
from tests.chaos.trainer.kills import Kills
from tests.chaos.trainer.samples import GROUP_SIZE, GROUPS_PER_STEP, recorded_groups
from tests.chaos.trainer.scenarios import Outcome
from tests.chaos.trainer.weights import compare, forget_momentum, greatest_difference


def history(*trained: Sequence[str], committed: dict[str, int] | None = None) -> History:
    """Steps from 1 on; the ledger agrees unless it is given."""
    steps = list(enumerate(trained, 1))
    agreed = {sample: step for step, samples in steps for sample in samples}
    return History(trained=steps, committed=agreed if committed is None else committed)


REFERENCE = history(["a", "b"], ["c", "d"], ["e", "f"])


@pytest.mark.parametrize(
    ("found", "twice", "skipped", "moved"),
    [
        (REFERENCE, 0, 0, 0),
        # A step repeated on other samples: those of the crash are in no weights.
        (history(["a", "b"], ["e", "f"], ["g", "h"]), 0, 2, 4),
        (history(["a", "b"], ["c", "d"], ["a", "b"]), 2, 2, 2),
        (history(["a", "b"], ["c"], ["e", "f"]), 0, 1, 0),
        # Consumed by the ledger, and never trained.
        (
            history(["a"], committed={"a": 1, "z": 1}),
            0,
            6,
            0,
        ),
        # Trained, and to be had again.
        (history(["a", "b"], ["c", "d"], ["e", "f"], committed={}), 0, 0, 6),
    ],
)
def test_samples_must_be_those_of_the_undisturbed_run(
    found: History, twice: int, skipped: int, moved: int
) -> None:
    """Each once, in the same step, and so in the ledger."""
    verdict = check_recorded(found, REFERENCE)
    assert (
        verdict.samples_committed_twice,
        verdict.samples_skipped,
        verdict.samples_moved,
    ) == (twice, skipped, moved)


def test_a_step_that_is_missing_or_there_twice_is_counted() -> None:
    """Whatever it was trained on."""
    lines = [(1, ["a", "b"]), (3, ["e", "f"]), (3, ["g"])]
    verdict = check_recorded(History(trained=lines, committed={}), REFERENCE)
    assert verdict.steps_wrong == 2


def test_a_loss_that_is_no_number_is_counted() -> None:
    """Infinite ones too."""
    lines = History(trained=(), committed={}, losses=[0.5, math.nan, -math.inf])
    assert check_recorded(lines, lines).losses_not_finite == 2


def delivery(
    trained: History, finished: Sequence[str], available: Sequence[str] = (), num_steps: int = 1
) -> tuple[int, int, int]:
    """Samples twice, skipped and moved, in groups of two."""
    verdict = check_delivery(
        trained,
        num_steps=num_steps,
        finished=finished,
        available=available,
        group_size=2,
        groups_per_step=1,
    )
    return verdict.samples_committed_twice, verdict.samples_skipped, verdict.samples_moved


def test_a_step_that_is_not_of_whole_groups_is_wrong() -> None:
    """A group of which a later step has the rest, or a group too few."""
    given = {"finished": [], "available": [], "group_size": 2, "groups_per_step": 2}
    whole = ["t/0/1#turn", "t/1/1#turn", "u/0/1#turn", "u/1/1#turn"]
    assert check_delivery(history(whole), num_steps=1, **given).steps_wrong == 0  # type: ignore[arg-type]
    for short in (whole[:2], whole[:3], [*whole[:3], "v/0/1#turn"]):
        assert check_delivery(history(short), num_steps=1, **given).steps_wrong == 1  # type: ignore[arg-type]


def test_what_producers_wrote_is_trained_or_still_there() -> None:
    """But for groups that are not complete."""
    first = history(["t/0/1#turn", "t/1/1#turn"])
    finished = ["t/0/1", "t/1/1", "u/0/1", "u/1/2", "v/0/1"]
    later = ["u/0/1#turn", "u/1/2#turn"]
    assert delivery(first, finished, later) == (0, 0, 0)
    assert delivery(first, finished) == (0, 2, 0), "lost"
    assert delivery(first, finished, later[:1]) == (0, 1, 0)
    assert delivery(first, finished, [*later, "t/0/1#turn"]) == (1, 0, 0), "to be trained again"
    assert delivery(first, finished, [*later, later[0]]) == (1, 0, 0)


def test_the_ledger_and_the_metrics_must_agree() -> None:
    """On what was consumed, and for which step."""
    lines = [["t/0/1#turn", "t/1/1#turn"]]
    finished = ["t/0/1", "t/1/1"]
    other = {"t/0/1#turn": 2, "t/1/1#turn": 1}
    assert delivery(history(*lines, committed=other), finished) == (0, 0, 1)
    more = {"t/0/1#turn": 1, "t/1/1#turn": 1, "u/0/1#turn": 1}
    assert delivery(history(*lines, committed=more), finished) == (0, 1, 0)


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the same checkpoint."""
    folders = tmp_path / "ours", tmp_path / "theirs"
    for folder in folders:
        folder.mkdir()
        tensors = {
            "parameter.w": torch.ones(3),
            "exp_avg.w": torch.ones(3),
            "step.w": torch.ones(()),
        }
        save_file(tensors, folder / "rank_00000_of_00001.safetensors")
    return folders


def test_equal_tensors_are_equal_to_the_bit(weights: tuple[Path, Path]) -> None:
    """A zero of the other sign is another bit."""
    ours, theirs = weights
    assert compare(ours, theirs) == Verdict(tensors_compared=3)
    assert greatest_difference(ours, theirs) == 0.0
    for folder, zero in ((ours, 0.0), (theirs, -0.0)):
        save_file({"w": torch.tensor([zero])}, folder / "model.safetensors")
    assert compare(ours, theirs) == Verdict(tensors_compared=4, tensors_unequal=1)
    assert greatest_difference(ours, theirs) == 0.0


def test_what_is_missing_is_not_equal(weights: tuple[Path, Path], tmp_path: Path) -> None:
    """Nor is nothing at all."""
    ours, theirs = weights
    save_file({"w": torch.ones(1)}, theirs / "model.safetensors")
    assert compare(ours, theirs).tensors_unequal == 1
    assert greatest_difference(ours, theirs) == math.inf
    assert compare(tmp_path, tmp_path).tensors_unequal == 1


def test_momentum_is_forgotten_and_nothing_else(weights: tuple[Path, Path]) -> None:
    """A checkpoint without any would make the control prove nothing."""
    ours, theirs = weights
    forget_momentum(ours)
    (path,) = ours.iterdir()
    assert load_file(path)["exp_avg.w"].eq(0).all()
    assert compare(ours, theirs).tensors_unequal == 1
    save_file({"w": torch.ones(1)}, ours / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"has no exp_avg\.\*"):
        forget_momentum(ours)


def test_a_recording_is_the_same_every_time() -> None:
    """With several versions in its spans, none newer than the step begins from."""
    groups, again = (list(recorded_groups(seed=3, num_steps=6)) for _ in range(2))
    assert groups == again
    assert groups != list(recorded_groups(seed=4, num_steps=6))
    assert len(groups) == 6 * GROUPS_PER_STEP
    for number, group in enumerate(groups):
        spans = [span for rollout in group.rollouts for span in rollout.turns[0].tokens.spans]
        assert len(group.rollouts) == GROUP_SIZE
        assert max(span.weight_version for span in spans) <= number // GROUPS_PER_STEP
    last = [span.weight_version for r in groups[-1].rollouts for span in r.turns[0].tokens.spans]
    assert len(set(last)) > 2


def test_a_crash_takes_the_children_of_the_process_with_it(tmp_path: Path) -> None:
    """Also those with a session of their own, as torchrun's ranks have."""
    grandchild = "import time; time.sleep(60)"
    child = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(60)"
    )
    with Gang([sys.executable, "-c", child], tmp_path) as gang:
        while not gang.log.read_text().endswith("\n"):
            time.sleep(0.01)
        assert gang.crash()
    pid = int(gang.log.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_who_came_to_an_end_was_not_killed(tmp_path: Path) -> None:
    """A kill counts where there was something to kill."""
    with Gang([sys.executable, "-c", ""], tmp_path) as gang:
        while gang.running:
            time.sleep(0.01)
        assert not gang.crash()
    failing = Gang([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)
    with failing, pytest.raises(RuntimeError, match="ended with 3"):
        failing.finish()


def test_two_ranks_are_started_by_torchrun() -> None:
    """One is not."""
    assert command("trainer", 1, ["--resume"])[1:] == ["-m", "trainer", "--resume"]
    assert command("trainer", 2, [])[2] == "torch.distributed.run"


def test_figures_tell_what_is_broken() -> None:
    """Weights count where any were compared; a difference that is no number is none that holds."""
    good = Outcome(verdict=Verdict(tensors_compared=5), kills=Kills(kills_in_step=2))
    assert figures_of(good)["weights_bit_equal"] == 1
    assert figures_of(good)["trainer_kills"] == 2
    assert broken(figures_of(good)) == []
    assert "weights_bit_equal" not in figures_of(Outcome())
    bad = good + Outcome(
        verdict=Verdict(tensors_unequal=1),
        kills_missed=1,
        figures={
            "resized_weights_max_difference": math.nan,
            "negative_controls": 4,
            "negative_controls_failed": 3,
        },
    )
    assert figures_of(bad)["weights_bit_equal"] == 0
    assert broken(figures_of(bad)) == [
        "resized_weights_max_difference",
        "tensors_unequal",
        "kills_missed",
        "negative_controls_failed",
    ]


def test_a_control_is_seen_by_what_it_must_find() -> None:
    """Anything else is another failure."""
    control = controls()["older-checkpoint"]
    assert not control.seen(Verdict(tensors_unequal=1))
    assert control.seen(Verdict(tensors_unequal=1, samples_skipped=1))
