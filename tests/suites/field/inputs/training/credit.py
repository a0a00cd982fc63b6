"""Which tokens are credited with which rewards: turns, branches, rollouts that a limit cut off."""

# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies
from numpy.typing import NDArray
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.trainer.ranks.gradients import config
from tests.suites.field.kind import Kind
from trainer.algorithms.base import Algorithm, make_algorithm
from trainer.config import TrainerConfig
from trainer.data.advantages import compute_advantages
from trainer.data.micro_batch import MicroBatch
from trainer.data.token_sequence import TokenSequence, sequence
from trainer.policy.forward import Predicted, policy_loss
from trainer.step.chunk_commands import ChunkCommands


@dataclass(frozen=True, slots=True)
class OneTurn:
    """A turn of two prompt tokens and some sampled ones."""

    sampled: int
    trained: bool
    reward: float | None


@dataclass(frozen=True, slots=True)
class Path:
    """Turns from the root to a leaf."""

    turns: tuple[OneTurn, ...]
    reward: float
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Rewards of the branches of each rollout, one turn each, and the group's baseline."""

    rollouts: tuple[tuple[float, ...], ...]


def _sample(path: Path, rollout: str = "r", name: str = "s") -> trajectory_pb2.Sample:
    sample = trajectory_pb2.Sample(sample_id=name, rollout_id=rollout, group_id="g")
    sample.rewards.add(name="reward", value=path.reward)
    sample.truncated = path.truncated
    for number, turn in enumerate(path.turns):
        part = sample.turns.add(turn_id=f"{name}.{number}", num_tokens=2 + turn.sampled)
        if turn.reward is not None:
            part.rewards.add(name="reward", value=turn.reward, turn_id=part.turn_id)
        _add_span(sample, tokens_pb2.ORIGIN_ENVIRONMENT, 2)
        _add_span(sample, tokens_pb2.ORIGIN_POLICY, turn.sampled)
        sample.loss_mask += bytes(2) + bytes([turn.trained] * turn.sampled)
    total = len(sample.loss_mask)
    ids = np.arange(total, dtype="<i4") + (zlib.crc32(name.encode()) % 97) * 100
    sample.tokens.token_ids = ids.tobytes()
    sample.tokens.logprobs = np.full(total, -1.0, "<f4").tobytes()
    return sample


def _add_span(sample: trajectory_pb2.Sample, origin: Any, number: int) -> None:
    sample.tokens.spans.add(
        start=len(sample.loss_mask),
        num_tokens=number,
        origin=origin,
        version_source=tokens_pb2.VERSION_SOURCE_ENGINE,
    )


def _settings(name: str, **settings: Any) -> TrainerConfig:
    exact = {"algorithm__gae_lambda": 1.0, "algorithm__discount": 1.0}
    return config(name, **exact, **settings)


def _batches(items: Sequence[TokenSequence], settings: TrainerConfig) -> Sequence[MicroBatch]:
    (command,) = ChunkCommands(settings, 1, packed=True).of(items, weight_version=0)
    return command.micro_batches


def _advantages(batch: MicroBatch, algorithm: Algorithm, values_BT: NDArray[Any]) -> NDArray[Any]:
    """What each trainable token is credited with: -dL / d log-prob over its weight, at ratio 1."""
    logprobs = torch.from_numpy(batch.behaviour_logprobs_BT[:, 1:]).double().requires_grad_()
    predicted = Predicted(
        logprobs_BT=logprobs, values_BT=torch.from_numpy(values_BT).requires_grad_(), num_tokens=0
    )
    loss, *_ = policy_loss(algorithm, batch, predicted, weight_version=0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    found: NDArray[Any] = -logprobs.grad.numpy() / batch.weights_B[:, None]
    return found


def _check_returns(case: tuple[str, Path]) -> None:
    """With gamma = lambda = 1 an action earns what comes after it, less its value."""
    name, path = case
    settings = _settings(name, algorithm__bootstrap_truncated=True)
    algorithm = make_algorithm(settings)
    (batch,) = _batches([sequence(_sample(path))], settings)
    values_BT = np.random.default_rng(0).normal(size=batch.token_ids_BT.shape)
    found = _advantages(batch, algorithm, values_BT)[0]
    starts, expected = _expected(path, values_BT[0], by_turn=name == "turn_ppo")
    np.testing.assert_allclose(found[starts], expected, atol=1e-6)


def _expected(
    path: Path, values_T: NDArray[Any], *, by_turn: bool
) -> tuple[list[int], NDArray[Any]]:
    """Index into the predicted tokens of each action's first token, and its advantage."""
    ends = np.cumsum([2 + turn.sampled for turn in path.turns])
    starts, found = [], []
    # A row ends with its last trained token.
    last = max(n for n, turn in enumerate(path.turns) if turn.trained)
    cut_off = path.truncated and last == len(path.turns) - 1
    for number, turn in enumerate(path.turns):
        later = sum(each.reward or 0.0 for each in path.turns[number:])
        after = values_T[ends[-1] - 1] if cut_off else 0.0
        first = int(ends[number]) - turn.sampled
        for place in range(first, first + (1 if by_turn else turn.sampled)) if turn.trained else ():
            starts.append(place - 1)
            found.append(later + path.reward + after - values_T[place - 1])
    return starts, np.array(found)


def _check_branches(group: Group) -> None:
    """Each branch counts once for the mean of the group, whatever the others' rewards are."""
    settings = _settings("dr_grpo")
    items = []
    for rollout, rewards in enumerate(group.rollouts):
        for branch, reward in enumerate(rewards):
            path = Path((OneTurn(1, True, reward),), reward=0.0)
            items.append(sequence(_sample(path, f"r{rollout}", f"s{rollout}.{branch}")))
    found = compute_advantages(items, make_algorithm(settings), settings).advantages_N
    all_rewards = [reward for of_rollout in group.rollouts for reward in of_rollout]
    np.testing.assert_allclose(found, np.array(all_rewards) - np.mean(all_rewards), atol=1e-6)


@dataclass(frozen=True, slots=True)
class CutRollout:
    """Turns of a rollout, each with whether it is trained, and where a limit cut it off."""

    reward: float
    turns: tuple[bool, ...] = (True,)
    cut: str = ""
    """"end": in the last turn; "fork": in a turn that has no sample; empty: it ended by itself."""


def _cut_sample(rollout: CutRollout, name: str) -> trajectory_pb2.Sample:
    turns = tuple(OneTurn(2, trained, None) for trained in rollout.turns)
    sample = _sample(Path(turns, rollout.reward, rollout.cut == "end"), f"r{name}", f"s{name}")
    sample.rollout_truncated = bool(rollout.cut)
    return sample


def _check_masked(rollouts: tuple[CutRollout, ...]) -> None:
    """Those that were cut off are compared and not trained; the others weigh as if alone."""
    settings = _settings("dr_grpo", algorithm__mask_truncated=True)
    algorithm = make_algorithm(settings)
    items = [sequence(_cut_sample(each, str(n))) for n, each in enumerate(rollouts)]
    given = compute_advantages(items, algorithm, settings)
    rewards = np.array([each.reward for each in rollouts])
    np.testing.assert_allclose(given.advantages_N, rewards - np.mean(rewards), atol=1e-6)
    kept = [2 * sum(each.turns) for each in rollouts if not each.cut]
    alone = algorithm.token_weights(np.array(kept)).denominators_R.sum() if kept else 0.0
    assert given.denominator == alone
    trained = [b.loss_mask_BT.any(1).sum() for b in _batches(items, settings)]
    assert sum(trained) == len(kept)


_rewards = strategies.floats(-2, 2, width=32)
_turns = strategies.builds(
    OneTurn, strategies.integers(1, 3), strategies.booleans(), strategies.none() | _rewards
)
_paths = strategies.builds(
    Path,
    strategies.lists(_turns, min_size=1, max_size=5)
    .map(tuple)
    .filter(lambda turns: any(turn.trained for turn in turns)),
    _rewards,
    strategies.booleans(),
)
_cut_rollouts = strategies.builds(
    CutRollout,
    _rewards,
    strategies.lists(strategies.booleans(), min_size=1, max_size=4).filter(any).map(tuple),
    strategies.sampled_from(["", "end", "fork"]),
)
_CREDITED_TO_A_MASKED_TURN = Path((OneTurn(2, False, 1.0), OneTurn(2, True, 0.0)), reward=0.0)

KINDS = (
    Kind(
        name="rewards of turns",
        check=_check_returns,
        examples=[
            ("turn_ppo", _CREDITED_TO_A_MASKED_TURN),
            ("ppo", _CREDITED_TO_A_MASKED_TURN),
            ("turn_ppo", Path((OneTurn(2, True, 1.0), OneTurn(2, True, 0.0)), reward=0.5)),
            ("ppo", Path((OneTurn(2, True, 1.0), OneTurn(3, True, None)), reward=0.5)),
            ("ppo", Path((OneTurn(3, True, None),), reward=0.25, truncated=True)),
            ("turn_ppo", Path((OneTurn(3, True, None),), reward=0.25, truncated=True)),
        ],
        generated=strategies.tuples(strategies.sampled_from(["ppo", "turn_ppo"]), _paths),
        short=25,
    ),
    Kind(
        name="rewards of branches",
        check=_check_branches,
        examples=[
            Group(((1.0, 1.0, 0.0), (1.0, 1.0, 1.0))),
            Group(((1.0, 1.0 - 1e-9, 0.0), (1.0, 1.0, 1.0))),
        ],
        generated=strategies.builds(
            Group,
            strategies.lists(
                strategies.lists(
                    strategies.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4
                ).map(tuple),
                min_size=2,
                max_size=4,
            ).map(tuple),
        ),
        short=25,
    ),
    Kind(
        name="masked rollouts",
        check=_check_masked,
        examples=[
            (CutRollout(1.0), CutRollout(0.0, cut="end")),
            (CutRollout(1.0, cut="end"), CutRollout(0.0, cut="end")),
            (CutRollout(1.0), CutRollout(0.0, (True, False), cut="end")),  # Trinity-RFT #608
            (CutRollout(1.0), CutRollout(0.0, (True,), cut="fork")),
        ],
        generated=strategies.lists(_cut_rollouts, min_size=2, max_size=6).map(tuple),
        short=25,
    ),
)
