"""Baselines: from rewards to advantages, [R].

Shape suffixes: R rollouts, G groups.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.base import Rollouts

_Float = NDArray[np.float64]


def centred(rollouts: Rollouts) -> _Float:
    """r - mean(r) of the group."""
    groups_R, sizes_G = _groups(rollouts)
    means_G = np.bincount(groups_R, rollouts.rewards_R) / sizes_G
    difference: _Float = rollouts.rewards_R - means_G[groups_R]
    return difference


def standardised(rollouts: Rollouts, epsilon: float) -> _Float:
    """(r - mean(r)) / (std(r) + epsilon) of the group, by the population's standard deviation."""
    groups_R, sizes_G = _groups(rollouts)
    difference = centred(rollouts)
    deviations_G = np.sqrt(np.bincount(groups_R, difference**2) / sizes_G)
    scaled: _Float = difference / (deviations_G[groups_R] + epsilon)
    return scaled


def leave_one_out(rollouts: Rollouts) -> _Float:
    """r less the mean of the group's other rewards; 0 for a group of one."""
    groups_R, sizes_G = _groups(rollouts)
    scale_G = sizes_G / np.maximum(sizes_G - 1, 1)
    scaled: _Float = centred(rollouts) * scale_G[groups_R]
    return scaled


def whitened(rollouts: Rollouts, epsilon: float) -> _Float:
    """(r - mean(r)) / (std(r) + epsilon), over all tokens of the step."""
    return _whitened(rollouts.rewards_R, rollouts.num_tokens_R, epsilon)


def whitened_centred(rollouts: Rollouts, epsilon: float) -> _Float:
    """r - mean(r) of the group, then whitened over all tokens of the step."""
    return _whitened(centred(rollouts), rollouts.num_tokens_R, epsilon)


def _whitened(values: _Float, num_tokens_R: NDArray[np.int64], epsilon: float) -> _Float:
    """Weight rollouts by their tokens, so that the tokens' advantages sum to 0."""
    share_R = num_tokens_R / max(num_tokens_R.sum(), 1)
    difference = values - share_R @ values
    scaled: _Float = difference / (np.sqrt(share_R @ difference**2) + epsilon)
    return scaled


def _groups(rollouts: Rollouts) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The index of each rollout's group, and the size of each group."""
    _, groups_R = np.unique(np.asarray(rollouts.group_ids), return_inverse=True)
    return groups_R, np.bincount(groups_R)
