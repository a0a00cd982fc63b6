"""Context parallelism: ranks that compute the same tokens together, each a slice of them.

DeepSpeed-Ulysses (arXiv 2309.14509, section 3.1): a rank has all heads of its slice of the tokens;
within attention it has all tokens of its share of the heads. One exchange among the ranks leads
there, another one back.

Shape suffixes: U tokens, S tokens of a slice (the last ones may be padding), H heads, D values of a
head, R ranks of the group, N tokens that are kept, M most of them on a rank.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """The group on one of its ranks."""

    group: ProcessGroup
    size: int
    """Ranks."""
    number: int
    """Of this rank, from 0."""

    def own_tokens(self, tokens: Tensor, fill: int = 0) -> Tensor:
        """This rank's slice, [S, ...] of [U, ...], padded with `fill`."""
        size = self.slice_size(len(tokens))
        before = (0, 0) * (tokens.dim() - 1)
        padded = pad(tokens, (*before, 0, self.size * size - len(tokens)), value=fill)
        return padded[self.number * size : (self.number + 1) * size]

    def own_heads(self, values_H: Tensor) -> Tensor:
        """This rank's share of what each query head has one of."""
        return values_H.chunk(self.size)[self.number]

    def slice_size(self, num_tokens: int) -> int:
        """S: tokens of a slice."""
        return -(-num_tokens // self.size)

    def to_heads(self, states: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
        """Exchange tokens for heads. Collective.

        Heads of keys and values that the group's size does not divide are repeated, as few times as
        possible: each rank has those that its query heads attend with.

        Args:
            states: queries, keys and values of this rank's slice, each [1, H, S, D].
            num_tokens: U, without the padding of slices.

        Returns:
            Of each, all tokens of this rank's heads, [1, H / R, U, D].

        Raises:
            ValueError: the ranks do not share the query heads evenly.
        """
        if states[0].shape[1] % self.size:
            raise ValueError(
                f"context_parallel is {self.size} and a layer has {states[0].shape[1]} query "
                "heads: give a divisor of their number"
            )
        parts = [self._by_rank(each) for each in states]
        sizes = [each[0].numel() for each in parts]
        sent = torch.cat([each.flatten(1) for each in parts], 1)
        received = torch.split(self._exchange(sent), sizes, 1)
        pairs = zip(received, parts, strict=True)
        return [_joined(got.reshape(like.shape), num_tokens) for got, like in pairs]

    def to_tokens(self, states_UHD: Tensor) -> Tensor:
        """Exchange heads for tokens. Collective.

        Args:
            states_UHD: all tokens of this rank's query heads.

        Returns:
            This rank's slice of the tokens, of all heads, [S, R * H, D].
        """
        num_tokens, *rest = states_UHD.shape
        size = self.slice_size(num_tokens)
        padded = pad(states_UHD, (0, 0, 0, 0, 0, self.size * size - num_tokens))
        received_RSHD = self._exchange(padded.reshape(self.size, size, *rest))
        return received_RSHD.transpose(0, 1).flatten(1, 2)

    def keep(self, places_N: Tensor, num_tokens: int) -> KeptTokens:
        """The tokens at some places, each on the rank that computes it.

        Args:
            places_N: indices of tokens among all U, int64.
            num_tokens: U.
        """
        size = self.slice_size(num_tokens)
        owners_N = places_N // size
        counts_R = owners_N.bincount(minlength=self.size)
        most = max(int(counts_R.max()), 1)  # not every backend gathers nothing
        order_N = owners_N.argsort(stable=True)
        starts_R = counts_R.cumsum(0) - counts_R
        within_N = torch.empty_like(order_N)
        numbers_N = torch.arange(len(order_N), device=order_N.device)
        within_N[order_N] = numbers_N - starts_R[owners_N[order_N]]
        own = (owners_N == self.number).nonzero()[:, 0]
        return KeptTokens(
            context=self,
            own=own,
            places=places_N[own] - self.number * size,
            most=most,
            found_N=owners_N * most + within_N,
        )

    def _by_rank(self, states: Tensor) -> Tensor:
        """From [1, H, S, D] to what each rank gets, [R, H / R, S, D]."""
        times = self.size // math.gcd(states.shape[1], self.size)
        repeated = states[0].repeat_interleave(times, 0) if times > 1 else states[0]
        return repeated.reshape(self.size, -1, *repeated.shape[1:])

    def _exchange(self, sent: Tensor) -> Tensor:
        """Of each rank, what it has for this one; both [R, ...]."""
        found: Tensor = _Exchange.apply(sent, self.group)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """Tokens whose outputs are kept, spread over the ranks of a group."""

    context: ContextGroup
    own: Tensor
    """Which of the N tokens this rank has, int64."""
    places: Tensor
    """Their places in its slice, int64."""
    most: int
    """M: tokens of the rank that has most."""
    found_N: Tensor
    """Index of each token in the outputs of all ranks, [R * M]."""

    def gather(self, outputs: Tensor) -> Tensor:
        """The outputs of all ranks. Collective.

        What is computed from them is computed on every rank of the group alike: in the backward
        pass each takes the gradient of its own outputs, which is whole, from its own computation.

        Args:
            outputs: of this rank's tokens, [1, number of `own`, ...].

        Returns:
            Of all tokens, [1, N, ...].
        """
        mine = outputs[0]
        padded = mine.new_zeros((self.most, *mine.shape[1:])).index_copy(
            0, torch.arange(len(mine), device=mine.device), mine
        )
        context = self.context
        gathered: Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
            padded, context.group, context.size, context.number
        )
        return gathered.flatten(0, 1).index_select(0, self.found_N)[None]


def _joined(parts: Tensor, num_tokens: int) -> Tensor:
    """From the slices of all ranks, [R, H, S, D], to [1, H, U, D]."""
    return parts.transpose(0, 1).flatten(1, 2)[None, :, :num_tokens]


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts: its own adjoint."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(sent: Tensor, group: ProcessGroup) -> Tensor:
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Gather(torch.autograd.Function):
    """All-gather of what every rank goes on to compute with alike."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: ProcessGroup, size: int, number: int) -> Tensor:
        ctx.number = number
        gathered = mine.new_empty((size, *mine.shape))
        dist.all_gather(list(gathered.unbind()), mine.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.number], None, None, None
