"""The sequences in the cache's slots, and their state as tensors for one step.

A sequence gets a slot, copies a cached prefix into it, prefills the rest in parts, and then
decodes: one token a step, in a dense row of the batch. A step costs one forward pass and a handful
of small tensor operations, whatever the number of rows: with models that fit a CPU,
per-row work in Python would limit throughput.

Shapes: R rows, M moves, V vocabulary, N blocks of B tokens.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry their shapes in their names

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from rollout.server.engines.engine import EngineRequest
from rollout.server.engines.torch.prefix_cache import CachedPrefix, PrefixIndex
from rollout.server.engines.torch.row_model import Part, Step
from rollout.server.engines.torch.transformers_model import LoadedModel

_BLOCK = 128


@dataclass(slots=True)
class SamplingRows:
    """What the rows of one step ask for. Flags let a step skip what no row needs."""

    temperature_R: Tensor
    """float32; 0 is greedy."""
    top_p_R: Tensor
    """float32 in (0, 1]."""
    top_k_R: Tensor
    """int64; at least the vocabulary size means all."""
    min_p_R: Tensor
    """float32 in [0, 1]; 0 keeps all."""
    seed_R: Tensor
    """int64."""
    position_R: Tensor
    """int64; index in the whole sequence of the token that conditions the draw."""
    all_greedy: bool
    any_greedy: bool
    scaled: bool
    """Some row has a temperature that is neither 0 nor 1."""
    filtered: bool
    """Some row has top-p, top-k or min-p."""


def sample(logits_RV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Return the sampled ids (int64 [R]) and their log-probs (float32 [R], before any filter).

    The random number of a seeded row is a function of (seed, position) alone, so that a sequence
    which is interrupted and continued, here or elsewhere, draws what it would have drawn.
    """
    logits_RV = logits_RV.float()
    if rows.scaled:
        # Greedy rows keep temperature 1: their log-prob is that of the plain distribution.
        temperature_R = torch.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
        logits_RV = logits_RV / temperature_R[:, None]
    largest_R1 = logits_RV.amax(-1, keepdim=True)
    weights_RV = (logits_RV - largest_R1).exp_()
    total_R1 = weights_RV.sum(-1, keepdim=True)
    if rows.all_greedy:
        ids_R = logits_RV.argmax(-1)
    else:
        uniform_R = uniform(rows.seed_R, rows.position_R)
        if rows.filtered:
            ids_R = _draw_filtered(weights_RV / total_R1, uniform_R, rows)
        else:
            ids_R = _invert(weights_RV, uniform_R)
        if rows.any_greedy:
            ids_R = torch.where(rows.temperature_R > 0, ids_R, logits_RV.argmax(-1))
    logits_R1 = logits_RV.gather(1, ids_R[:, None])
    return ids_R, (logits_R1 - largest_R1 - total_R1.log())[:, 0]


def _draw_filtered(probs_RV: Tensor, uniform_R: Tensor, rows: SamplingRows) -> Tensor:
    probs_RV, order_RV = probs_RV.sort(-1, descending=True)
    # A token stays while the tokens before it do not reach top_p: the first one always stays.
    before_RV = probs_RV.cumsum(-1) - probs_RV
    rank_V = torch.arange(probs_RV.shape[1])
    keep_RV = (before_RV < rows.top_p_R[:, None]) & (rank_V < rows.top_k_R[:, None])
    keep_RV &= probs_RV >= rows.min_p_R[:, None] * probs_RV[:, :1]
    place_R = _invert(probs_RV * keep_RV, uniform_R)
    return order_RV.gather(1, place_R[:, None])[:, 0]


def _invert(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Invert the cumulative distribution of unnormalised weights; weight 0 is never chosen.

    First which block of the vocabulary, then where in it: a running sum, which no processor adds
    up in parallel, is taken of the blocks' sums and of one block, not of the whole vocabulary.
    """
    if rest := -weights_RV.shape[1] % _BLOCK:
        weights_RV = functional.pad(weights_RV, (0, rest))
    weights_RNB = weights_RV.view(len(weights_RV), -1, _BLOCK)
    cumulative_RN = weights_RNB.sum(-1).cumsum(-1)
    threshold_R1 = uniform_R[:, None] * cumulative_RN[:, -1:]
    block_R1 = torch.searchsorted(cumulative_RN, threshold_R1, right=True)
    before_R1 = functional.pad(cumulative_RN, (1, 0)).gather(1, block_R1)
    row_R = torch.arange(len(weights_RV))
    cumulative_RB = weights_RNB[row_R, block_R1[:, 0]].cumsum(-1)
    # Below the block's sum: added up in another order, that may round differently.
    threshold_R1 = torch.minimum(
        threshold_R1 - before_R1, cumulative_RB[:, -1:] * (1 - torch.finfo(torch.float32).eps)
    )
    place_R1 = torch.searchsorted(cumulative_RB, threshold_R1, right=True)
    return (block_R1 * _BLOCK + place_R1)[:, 0]


def uniform(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return float32 in [0, 1), a hash (splitmix64) of seed and position.

    It has 23 bits, so that scaled by a total it stays below the total after rounding.
    """
    value_R = seed_R + (position_R + 1) * -0x61C8864680B583EB
    value_R = (value_R ^ _shift(value_R, 30)) * -0x40A7B892E31B1A47
    value_R = (value_R ^ _shift(value_R, 27)) * -0x6B2FB644ECCEEE15
    value_R = value_R ^ _shift(value_R, 31)
    return _shift(value_R, 41).float() * 2.0**-23


def _shift(value_R: Tensor, bits: int) -> Tensor:
    """Shift right without the sign bit, which torch's int64 shift would repeat."""
    return (value_R >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(slots=True, eq=False)
class DecodedSequence:
    """One request: prefix and output in one list."""

    request: EngineRequest
    token_ids: list[int]
    """Prefix, then everything sampled so far."""
    limit: int
    """The length at which it ends."""
    stop_ids: frozenset[int]
    seed: int
    """63 bits; drawn once for a request without a seed, so that a pause changes no token."""
    sent: int
    """Length of `token_ids` already sent, prefix included."""
    fresh: bool
    """Whether the next token is the first one of a streamed request, which is sent immediately."""
    kept_until: float
    """Tokens are buffered until this time of the monotonic clock."""
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens not sent yet."""
    routed_from: int | None = None
    """The first token whose routed experts have not been sent; None: they are not asked for."""
    slot: int = -1
    """Its slot in the cache, while it is in the batch."""
    prefix_entry: CachedPrefix | None = None
    """Its entry in the prefix index, while it is in the batch."""

    @classmethod
    def of(
        cls, request: EngineRequest, eos_token_ids: tuple[int, ...], max_context: int
    ) -> DecodedSequence:
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
            fresh=not request.chunk_seconds,
            kept_until=time.monotonic() + request.chunk_seconds,
            routed_from=None if request.routed_from is None else max(request.routed_from, 1),
        )

    @property
    def unfilled(self) -> int:
        """Tokens to prefill: all but the last, which the first decode step feeds."""
        assert self.prefix_entry is not None
        return len(self.token_ids) - 1 - self.prefix_entry.cached


class Batch:
    """Sequences that decode (rows 0 .. len-1), and sequences that are being prefilled."""

    def __init__(self, model: LoadedModel, num_slots: int) -> None:
        self._model = model
        self._free_slots = list(range(num_slots))
        self._rows: list[DecodedSequence] = []
        self._filling: list[DecodedSequence] = []
        self._prefixes = PrefixIndex(keep=num_slots)
        device = model.device
        self._ints = torch.zeros(4, num_slots, dtype=torch.int64, device=device)
        self._floats = torch.ones(3, num_slots, device=device)
        self._token, self._position, self._seed, self._top_k = self._ints
        self._temperature, self._top_p, self._min_p = self._floats
        self._refresh()

    def __len__(self) -> int:
        return len(self._rows) + len(self._filling)

    @property
    def sequences(self) -> Sequence[DecodedSequence]:
        return [*self._rows, *self._filling]

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free_slots)

    @property
    def unfilled(self) -> int:
        """Tokens still to be prefilled."""
        return sum(sequence.unfilled for sequence in self._filling)

    def admit(self, sequence: DecodedSequence, *, waits: bool = True) -> bool:
        """Give `sequence` a slot, and copy a cached prefix into it.

        False, changing nothing, if another is prefilling what it could copy: it is to come again.
        Unless it `waits`, it is then prefilled itself.
        """
        rotation = self._model.rows.rotation(len(sequence.token_ids))
        found = self._prefixes.find(sequence.token_ids, rotation)
        if found is not None and found[0].cached < found[1]:
            if waits:
                return False
            found = None
        sequence.slot = self._free_slots.pop(0)
        sequence.prefix_entry = self._prefixes.begin(sequence.token_ids, sequence.slot, rotation)
        if found is not None:
            entry, length = found
            rows = self._model.rows
            copy = entry.copy if entry.slot is None else rows.read(entry.slot, length)
            rows.write(sequence.slot, copy, length)
            sequence.prefix_entry.cached = length
        self._filling.append(sequence)
        return True

    def step(self, prefill_tokens: int) -> list[tuple[DecodedSequence, int, float]]:
        """Sample one token for every row and prefill at most `prefill_tokens`.

        Returns each sequence that decoded with its new token and log-prob, in row order.
        """
        if self._model.changes_rotation:
            self._prefill_again()
        self._start_rows([sequence for sequence in self._filling if sequence.unfilled == 0])
        rows = len(self._rows)
        step = Step(
            slots=[sequence.slot for sequence in self._rows],
            tokens_R=self._token[:rows],
            positions_R=self._position[:rows],
            longest=max((len(sequence.token_ids) for sequence in self._rows), default=0),
            parts=self._parts(prefill_tokens),
        )
        logits_RV = self._model.rows.forward(step)
        for sequence, part in zip(self._filling, step.parts, strict=False):
            assert sequence.prefix_entry is not None
            sequence.prefix_entry.cached = part.end
        if logits_RV is None:
            return []
        ids_R, logprobs_R = sample(logits_RV, self._sampling(rows))
        self._token[:rows] = ids_R
        self._position[:rows] += 1
        for sequence in self._rows:
            assert sequence.prefix_entry is not None
            sequence.prefix_entry.cached = len(sequence.token_ids)
        return list(zip(self._rows, ids_R.tolist(), logprobs_R.tolist(), strict=True))

    def _prefill_again(self) -> None:
        """Sequences whose cached keys are rotated otherwise than their length now asks for."""
        changed = []
        for sequence in self._rows:
            assert sequence.prefix_entry is not None
            rotation = self._model.rows.rotation(len(sequence.token_ids))
            if rotation != sequence.prefix_entry.rotation:
                changed.append(sequence)
        if changed:
            self.remove(changed)
        for sequence in changed:
            self.admit(sequence, waits=False)

    def _parts(self, tokens: int) -> list[Part]:
        """The next parts to prefill, in order of arrival."""
        parts = []
        for sequence in self._filling:
            count = min(tokens, sequence.unfilled)
            if count == 0:
                break
            assert sequence.prefix_entry is not None
            start, tokens = sequence.prefix_entry.cached, tokens - count
            part = sequence.token_ids[start : start + count]
            whole = len(sequence.token_ids)
            parts.append(Part(slot=sequence.slot, start=start, token_ids=part, row_length=whole))
        return parts

    def _start_rows(self, sequences: list[DecodedSequence]) -> None:
        """Let filled sequences decode: write their columns."""
        if not sequences:
            return
        rows = slice(len(self._rows), len(self._rows) + len(sequences))
        self._rows += sequences
        self._filling = [sequence for sequence in self._filling if sequence not in sequences]
        samplings = [sequence.request.sampling for sequence in sequences]
        self._ints[:, rows] = torch.tensor(
            [
                [sequence.token_ids[-1] for sequence in sequences],
                [len(sequence.token_ids) - 1 for sequence in sequences],
                [sequence.seed for sequence in sequences],
                [sampling.top_k or self._model.vocab_size for sampling in samplings],
            ],
            device=self._ints.device,
        )
        self._floats[:, rows] = torch.tensor(
            [
                [s.temperature for s in samplings],
                [s.top_p for s in samplings],
                [s.min_p for s in samplings],
            ],
            device=self._floats.device,
        )
        self._refresh()

    def _refresh(self) -> None:
        """Recompute what depends on which rows there are, not on how far they got."""
        samplings = [sequence.request.sampling for sequence in self._rows]
        self._all_greedy = all(s.temperature == 0 for s in samplings)
        self._any_greedy = any(s.temperature == 0 for s in samplings)
        self._scaled = any(s.temperature not in (0.0, 1.0) for s in samplings)
        self._filtered = any(s.top_p < 1.0 or s.top_k > 0 or s.min_p > 0.0 for s in samplings)

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

    def remove(self, gone: Sequence[DecodedSequence]) -> None:
        """Free the slots of sequences; copies of what they have cached are kept for a while."""
        for sequence in gone:
            prefix_entry = sequence.prefix_entry
            assert prefix_entry is not None
            if prefix_entry.cached:
                copy = self._model.rows.read(sequence.slot, prefix_entry.cached)
                self._prefixes.end(prefix_entry, copy)
            else:
                self._prefixes.forget(prefix_entry)
        self._model.rows.free([sequence.slot for sequence in gone])
        self._free_slots = sorted([*self._free_slots, *(sequence.slot for sequence in gone)])
        self._filling = [sequence for sequence in self._filling if sequence not in gone]
        self._close_gaps([row for row, sequence in enumerate(self._rows) if sequence in gone])

    def _close_gaps(self, gone: list[int]) -> None:
        """Move the last rows into rows `gone` (ascending)."""
        left = len(self._rows) - len(gone)
        holes = [row for row in gone if row < left]
        removed = set(gone)
        movers = [row for row in range(left, len(self._rows)) if row not in removed]
        if holes:
            source_M, target_M = torch.tensor([movers, holes], device=self._ints.device)
            for columns in (self._ints, self._floats):
                columns[:, target_M] = columns[:, source_M]
        for source, target in zip(movers, holes, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[left:]
        self._refresh()

    def clear(self) -> list[DecodedSequence]:
        """Free every slot; return the sequences that were in them. Nothing cached is kept."""
        sequences = [*self._rows, *self._filling]
        slots = [sequence.slot for sequence in sequences]
        self._model.rows.free(slots)
        self._free_slots = sorted([*self._free_slots, *slots])
        self._prefixes.clear()
        self._rows, self._filling = [], []
        self._refresh()
        return sequences
