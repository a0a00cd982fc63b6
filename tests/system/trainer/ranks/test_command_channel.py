"""One rank, two ranks, interrupted and resumed: the same training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.lib.trainer.ranks.whole_run import greatest_difference, losses, run
from tests.lib.trainer.support import JOB_CONFIG, ROUNDING, make_samples
from trainer.commands import Accumulate, Exit, Optimize, Release, decode, encode
from trainer.data.advantages import SequenceAdvantages
from trainer.data.micro_batch import MicroBatch, plan_micro_batches
from trainer.data.token_sequence import sequence
from trainer.ranks.process_group import check_nodes


@pytest.fixture(scope="module")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps on two ranks; then twice back to the checkpoint of the fifth.

    Once suspended on the way, once with each step in parts.
    """
    out = tmp_path_factory.mktemp("two")
    again = {"steps": list(range(6, 11)), "load": str(out / "checkpoints/step_000000005")}
    resumed = {"out": str(out / "resumed"), "suspend_before": 8, **again}
    in_parts = {"out": str(out / "in_parts"), "parts": [[2], [0, 1]], **again}
    return run(2, model, out, steps=list(range(1, 11)), save_after=5, then=[resumed, in_parts])


def test_two_ranks_and_one_give_the_same_losses_and_weights(
    straight_run: Path, two_ranks: Path
) -> None:
    """To rounding over ten steps in float64, and the weights did move."""
    assert losses(two_ranks) == pytest.approx(losses(straight_run), abs=ROUNDING)
    assert len(losses(two_ranks)) == 10
    assert greatest_difference(straight_run, two_ranks) < ROUNDING
    initial = load_file(straight_run / "checkpoints/step_000000005/rank_00000_of_00001.safetensors")
    final = load_file(straight_run / "weights.safetensors")
    assert max(float((initial[f"parameter.{n}"] - final[n]).abs().max()) for n in final) > 1e-3


def test_two_ranks_resumed_and_suspended_equal_the_uninterrupted_run(two_ranks: Path) -> None:
    """Loaded from the checkpoint of step 5, device state out and in before step 8: bit-equal."""
    assert losses(two_ranks / "resumed") == losses(two_ranks)[5:]
    assert greatest_difference(two_ranks / "resumed", two_ranks) == 0.0


def test_one_rank_resumes_bit_equal_and_from_two_ranks_to_rounding(
    model: Path, straight_run: Path, two_ranks: Path, tmp_path: Path
) -> None:
    """The shards of another world size are put together and cut anew."""
    for origin, tolerance in ((straight_run, 0.0), (two_ranks, ROUNDING)):
        resumed = run(
            1,
            model,
            tmp_path / origin.name,
            steps=list(range(6, 11)),
            load=str(origin / "checkpoints/step_000000005"),
            suspend_before=7,
        )
        assert greatest_difference(resumed, straight_run) <= tolerance


@pytest.mark.parametrize("parts", [[[0], [1], [2]], [[2], [0, 1]]], ids=str)
def test_parts_in_any_order_give_the_step_of_the_whole(
    model: Path, straight_run: Path, tmp_path: Path, parts: list[list[int]]
) -> None:
    """Ten steps, each computed as its groups arrive, with its device lent in between."""
    streamed = run(1, model, tmp_path, steps=list(range(1, 11)), parts=parts)
    assert losses(streamed) == pytest.approx(losses(straight_run), abs=ROUNDING)
    assert greatest_difference(streamed, straight_run) < ROUNDING


def test_parts_on_two_ranks_give_the_step_of_the_whole(two_ranks: Path) -> None:
    """Gradients of several commands add up on every rank."""
    assert losses(two_ranks / "in_parts") == pytest.approx(losses(two_ranks)[5:], abs=ROUNDING)
    assert greatest_difference(two_ranks / "in_parts", two_ranks) < ROUNDING


def test_a_part_that_is_left_out_is_noticed(
    model: Path, straight_run: Path, tmp_path: Path
) -> None:
    """Negative control: two groups of three are another step."""
    partial = run(1, model, tmp_path, steps=list(range(1, 11)), parts=[[0], [1]])
    assert greatest_difference(partial, straight_run) > 1e-4


def test_weights_of_tokens_and_their_denominator_reach_the_gradient(
    model: Path, tmp_path: Path
) -> None:
    """Twice the constant length: half the loss and half the gradient, whatever the tokens are."""
    first = {}
    for length in (8, 16):
        config = {**JOB_CONFIG, "algorithm__name": "dr_grpo", "algorithm__loss_length": length}
        out = run(1, model, tmp_path / str(length), steps=[1], config=config)
        (first[length],) = json.loads((out / "metrics.json").read_text())
    for name in ("loss", "grad_norm"):
        assert first[16][name] == pytest.approx(first[8][name] / 2, rel=1e-9)
        assert first[8][name] != 0
    sequences = [sequence(sample) for sample in make_samples(1)]
    behind = [2 - item.weight_versions_T[item.loss_mask_T] for item in sequences]
    assert first[8]["staleness_mean"] == pytest.approx(np.concatenate(behind).mean())


def test_a_resume_without_optimizer_state_is_noticed(
    model: Path, straight_run: Path, tmp_path: Path
) -> None:
    """Negative control: weights alone do not continue the run."""
    from safetensors.torch import save_file

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    name = "rank_00000_of_00001.safetensors"
    tensors = load_file(straight_run / "checkpoints/step_000000005" / name)
    kept = {key: value for key, value in tensors.items() if key == "rng" or "parameter." in key}
    save_file(kept, folder / name)
    resumed = run(1, model, tmp_path / "out", steps=[6, 7, 8, 9, 10], load=str(folder))
    assert greatest_difference(resumed, straight_run) > 1e-4


@pytest.mark.parametrize(
    ("nodes", "number"),
    [(("a", "a"), 2), (("a", "b"), 1), (("a", ""), 2), (("", ""), 2), (("a", "b", "c"), 2)],
)
def test_ranks_on_other_nodes_than_the_gang_has_are_refused(
    nodes: tuple[str, ...], number: int
) -> None:
    """The nodes and the cure are named."""
    with pytest.raises(ValueError, match=rf"trainer\.gang\.nodes is {number}.*gang\.node_id"):
        check_nodes(nodes, number)


@pytest.mark.parametrize(("nodes", "number"), [(("",), 1), (("", ""), 1), (("a", "b", "b"), 2)])
def test_ranks_on_the_nodes_of_the_gang_are_accepted(nodes: tuple[str, ...], number: int) -> None:
    """One node needs no name."""
    check_nodes(nodes, number)


def test_commands_survive_their_encoding() -> None:
    """A plan arrives at the other ranks as it was made, without pickle."""
    sequences = [sequence(sample) for sample in make_samples(0)]
    values = np.arange(12.0)
    given = SequenceAdvantages(
        advantages_N=values,
        weights_N=values,
        turn_rewards_N=[[(9, 0.5)]] * 12,
        bootstrap_N=np.zeros(12, bool),
        denominator=1.0,
    )
    (batches,) = plan_micro_batches(sequences, given, num_ranks=1, micro_batch_tokens=64)
    sent = Accumulate(weight_version=2, num_tokens=99, denominator=0.5, micro_batches=batches)
    received = decode(encode(sent))
    assert isinstance(received, Accumulate)
    assert received.weight_version == 2
    assert (received.num_tokens, received.denominator) == (99, 0.5)
    for one, other in zip(received.micro_batches, batches, strict=True):
        for name in MicroBatch.__slots__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            kinds = [getattr(getattr(each, name), "dtype", None) for each in (one, other)]
            assert kinds[0] == kinds[1]  # None: an optional field that is not there
    assert decode(encode(Optimize(step=3))) == Optimize(step=3)
    assert decode(encode(Release())) == Release()
    assert decode(encode(Exit())) == Exit()
