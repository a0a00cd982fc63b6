"""The running sequences as tensors: admit, step, remove, with rows kept dense.

A step costs one forward pass and a handful of small tensor operations, whatever the number of rows:
at the size of model that fits a CPU, per-row work in Python is what would limit throughput.

Shapes: R rows, P padded prompt length, T positions, M moves.
"""

# ruff: noqa: N806 -- tensors carry their shapes in their names

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout.server.engine import EngineRequest
from rollout.server.engines.model import SlotModel
from rollout.server.engines.sampling import SamplingRows, sample

__all__ = ["Batch", "Sequence"]

_WIDTH = 32
_PROMPT = 16


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way: prefix and output in one list."""

    request: EngineRequest
    token_ids: list[int]
    """Prefix, then everything sampled so far."""
    limit: int
    """The length at which it ends."""
    stop_ids: frozenset[int]
    """Ids that end it."""
    seed: int
    """63 bits; drawn once for a request without its own, so that being held changes nothing."""
    sent: int
    """How many of `token_ids` were handed out (the prefix counts as handed out)."""
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens not handed out yet."""
    fresh: bool = True
    """Nothing was handed out yet: the first token goes out alone, for whoever waits to see it."""

    def has_cached(self, other: Sequence) -> bool:
        """Whether a row with this sequence holds keys and values of all but `other`'s last token.

        Of its own tokens a row lacks those of the last one, which no step has fed yet.
        """
        length = len(other.token_ids) - 1
        if (
            not 0 < length < len(self.token_ids)
            or self.token_ids[length - 1] != other.token_ids[-2]
        ):
            return False
        return self.token_ids[:length] == other.token_ids[:length]

    @classmethod
    def of(
        cls, request: EngineRequest, eos_token_ids: tuple[int, ...], max_context: int
    ) -> Sequence:
        """Begin `request` on an engine with these stop ids and this context."""
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        seed = random.SystemRandom().getrandbits(63) if sampling.seed is None else sampling.seed
        return cls(
            request=request,
            token_ids=list(request.token_ids),
            limit=min(len(request.token_ids) + sampling.max_new_tokens, max_context),
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | set(eos_token_ids),
            seed=seed & (2**63 - 1),
            sent=len(request.token_ids),
        )


class Batch:
    """Rows 0 .. len-1 of the model's cache and everything a step needs about them."""

    def __init__(self, model: SlotModel, slots: int) -> None:
        self._model = model
        self._slots = slots
        self._rows: list[Sequence] = []
        self._ints = torch.zeros(4, slots, dtype=torch.int64)
        self._floats = torch.ones(3, slots)
        self._token, self._position, self._seed, self._top_k = self._ints
        self._temperature, self._top_p, self._min_p = self._floats
        self._all_rows = torch.arange(slots)
        self._mask_R11T = torch.empty(slots, 1, 1, 0)
        self._refresh()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sequences(self) -> Items[Sequence]:
        """The running sequences, in row order."""
        return self._rows

    @property
    def free(self) -> int:
        """Rows that can be admitted."""
        return self._slots - len(self._rows)

    def admit(self, sequences: list[Sequence], padded_tokens: int) -> None:
        """Give `sequences` free rows: copy what another row has, prefill the rest, shortest first.

        A pass prefills at most `padded_tokens`. The samples of one prompt are prefilled once.
        """
        new, copied = self._split(sorted(sequences, key=lambda sequence: len(sequence.token_ids)))
        admitted = [*new, *(sequence for sequence, _ in copied)]
        first = len(self._rows)
        self._rows += admitted
        row = first
        for group in _groups(new, padded_tokens):
            tokens_RP = _pad([sequence.token_ids[:-1] for sequence in group])
            if tokens_RP.shape[1]:
                self._model.prefill(tokens_RP, row)
            row += len(group)
        if copied:
            target_M = torch.arange(row, row + len(copied))
            longest = max(len(sequence.token_ids) for sequence, _ in copied)
            self._model.move(torch.tensor([donor for _, donor in copied]), target_M, longest - 1)
        self._describe(admitted, first)
        self._refresh()

    def _split(
        self, sequences: list[Sequence]
    ) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """Those to prefill, and those whose prefix a row holds already, with that row.

        Those to prefill get the next rows, in this order, and may be copied from too.
        """
        rows, copied = list(self._rows), list[tuple[Sequence, int]]()
        for sequence in sequences:
            donor = next((i for i, row in enumerate(rows) if row.has_cached(sequence)), None)
            if donor is None:
                rows.append(sequence)
            else:
                copied.append((sequence, donor))
        return rows[len(self._rows) :], copied

    def _describe(self, sequences: list[Sequence], first: int) -> None:
        """Write the columns of new rows first .. first+len(sequences)-1."""
        rows = slice(first, first + len(sequences))
        samplings = [sequence.request.sampling for sequence in sequences]
        positions = [len(sequence.token_ids) - 1 for sequence in sequences]
        self._ints[:, rows] = torch.tensor(
            [
                [sequence.token_ids[-1] for sequence in sequences],
                positions,
                [sequence.seed for sequence in sequences],
                [sampling.top_k or self._model.vocab_size for sampling in samplings],
            ]
        )
        self._floats[:, rows] = torch.tensor(
            [
                [s.temperature for s in samplings],
                [s.top_p for s in samplings],
                [s.min_p for s in samplings],
            ]
        )
        self._widen(max(positions) + 1)
        hidden_RT = self._columns()[None] >= self._position[rows, None]
        self._mask_R11T[rows, 0, 0] = hidden_RT * torch.finfo(torch.float32).min

    def _columns(self) -> Tensor:
        return torch.arange(self._mask_R11T.shape[3])

    def _widen(self, width: int) -> None:
        """Let the mask cover `width` positions, hiding the new ones."""
        old = self._mask_R11T
        if width <= old.shape[3]:
            return
        wanted = -(-max(width, 2 * old.shape[3]) // _WIDTH) * _WIDTH
        self._mask_R11T = torch.full((self._slots, 1, 1, wanted), torch.finfo(torch.float32).min)
        self._mask_R11T[..., : old.shape[3]] = old

    def _refresh(self) -> None:
        """Recompute what depends on which rows there are, not on how far they got."""
        samplings = [sequence.request.sampling for sequence in self._rows]
        self._longest = max((len(s.token_ids) for s in self._rows), default=0)
        self._all_greedy = all(s.temperature == 0 for s in samplings)
        self._any_greedy = any(s.temperature == 0 for s in samplings)
        self._scaled = any(s.temperature not in (0.0, 1.0) for s in samplings)
        self._filtered = any(s.top_p < 1.0 or s.top_k > 0 or s.min_p > 0.0 for s in samplings)

    def step(self) -> tuple[list[int], list[float]]:
        """Sample one token for every row; return ids and log-probs in row order."""
        rows = len(self._rows)
        self._widen(self._longest)
        token_R, position_R = self._token[:rows], self._position[:rows]
        self._mask_R11T[self._all_rows[:rows], 0, 0, position_R] = 0.0
        width = min(-(-self._longest // _WIDTH) * _WIDTH, self._mask_R11T.shape[3])
        logits_RV = self._model.decode(token_R, position_R, self._mask_R11T[:rows, :, :, :width])
        ids_R, logprobs_R = sample(logits_RV, self._sampling(rows))
        self._token[:rows] = ids_R
        position_R += 1
        self._longest += 1
        return ids_R.tolist(), logprobs_R.tolist()

    def _sampling(self, rows: int) -> SamplingRows:
        return SamplingRows(
            temperature_R=self._temperature[:rows],
            top_p_R=self._top_p[:rows],
            top_k_R=self._top_k[:rows],
            min_p_R=self._min_p[:rows],
            seed_R=self._seed[:rows],
            position_R=self._position[:rows],
            all_greedy=self._all_greedy,
            any_greedy=self._any_greedy,
            scaled=self._scaled,
            filtered=self._filtered,
        )

    def remove(self, gone: list[int]) -> None:
        """Free rows `gone` (ascending); the last rows move into the holes."""
        left = len(self._rows) - len(gone)
        holes = [row for row in gone if row < left]
        removed = set(gone)
        movers = [row for row in range(left, len(self._rows)) if row not in removed]
        if holes:
            source_M, target_M = torch.tensor(movers), torch.tensor(holes)
            self._model.move(source_M, target_M, self._longest)
            for columns in (self._ints, self._floats):
                columns[:, target_M] = columns[:, source_M]
            self._mask_R11T[target_M] = self._mask_R11T[source_M]
        for source, target in zip(movers, holes, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[left:]
        self._refresh()

    def clear(self) -> list[Sequence]:
        """Free every row; return the sequences that were in them. Nothing cached is kept."""
        rows, self._rows = self._rows, []
        self._refresh()
        return rows


def _groups(sequences: list[Sequence], padded_tokens: int) -> list[list[Sequence]]:
    """Cut ascending lengths into passes of bounded area, none padded to over twice its length."""
    groups: list[list[Sequence]] = []
    for sequence in sequences:
        length = len(sequence.token_ids)
        group = groups[-1] if groups else []
        fits = (len(group) + 1) * length <= padded_tokens
        if group and fits and length <= 2 * len(group[0].token_ids) + _PROMPT:
            group.append(sequence)
        else:
            groups.append([sequence])
    return groups


def _pad(prompts: list[list[int]]) -> Tensor:
    """Right-pad with 0 to a multiple of `_PROMPT`, so that few shapes occur."""
    length = -(-max(len(prompt) for prompt in prompts) // _PROMPT) * _PROMPT
    return torch.tensor([prompt + [0] * (length - len(prompt)) for prompt in prompts])
