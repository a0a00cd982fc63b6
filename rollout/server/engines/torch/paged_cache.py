"""A paged key/value cache: every slot owns pages of 32 positions, all slots share one pool.

Pages 0 .. n-1 are always the used ones, in any order, so attention of all decoding rows is two
batched products over the pool, whatever the rows' lengths: nothing is padded to the longest row.
A page's scores are combined with those of its row's other pages by the softmax's own algebra
(as in FlashDecoding).

Shapes: N tokens, R decoding rows, p pages, H query heads, K key/value heads, G = H / K, P = 32
positions in a page, D head size, S tokens of one prompt part, T positions.
"""

# ruff: noqa: N803, N806, N815 -- tensors carry their shapes in their names

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from rollout.server.engines.torch.row_model import Part, Step

PAGE = 32
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the tokens of one pass go and what they attend to; the same for every layer."""

    rows: int
    """R; the first tokens of the pass are theirs."""
    page_N: Tensor
    """Page each token is written to."""
    offset_N: Tensor
    """Position in that page."""
    row_p: Tensor
    """Decoding row each page belongs to."""
    row_pH: Tensor
    """The same, once for each query head."""
    mask_b1P: Tensor
    """0 where a row may look, -inf elsewhere; b = p * K."""
    parts: list[tuple[slice, Tensor, Tensor | None]] = field(default_factory=list)
    """Per prompt part: its tokens, its pages, and its mask [S, T] (None: causal from 0)."""


class PagedCache:
    """Keys and values of all slots, for all layers."""

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Start with no page; the pool grows on demand."""
        self._heads = heads
        self._shape = (layers, kv_heads, head_size)
        self._options = {"dtype": dtype, "device": device}
        self._device = device
        self._within_P = torch.arange(PAGE, device=device)
        self.clear()

    def clear(self) -> None:
        """Drop every page and the pool."""
        self._pages: dict[int, list[int]] = {}
        self._owner: list[int] = []
        self._keys = self._values = self._pool(0)

    def _pool(self, pages: int) -> Tensor:
        # Zeros, not empty: a masked position still enters 0 * value, and 0 * NaN is NaN.
        layers, heads, size = self._shape
        return torch.zeros(layers, pages, heads, PAGE, size, **self._options)  # type: ignore[call-overload,no-any-return]

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def reserve(self, slot: int, positions: int) -> None:
        """Give a slot pages for its first `positions`."""
        pages = self._pages.setdefault(slot, [])
        while len(pages) * PAGE < positions:
            pages.append(len(self._owner))
            self._owner.append(slot)
        if len(self._owner) > self._keys.shape[1]:
            self._grow()

    def _grow(self) -> None:
        held = self._keys.shape[1]
        num_pages = max(len(self._owner), held * 3 // 2, 16)
        keys, values = self._pool(num_pages), self._pool(num_pages)
        keys[:, :held], values[:, :held] = self._keys, self._values
        self._keys, self._values = keys, values

    def free(self, slots: list[int]) -> None:
        """Take the pages of slots; the last pages of the pool move into the holes."""
        holes = {page for slot in slots for page in self._pages.pop(slot, ())}
        left = len(self._owner) - len(holes)
        movers = [page for page in range(left, len(self._owner)) if page not in holes]
        targets = [page for page in sorted(holes) if page < left]
        for mover, target in zip(movers, targets, strict=True):
            owner = self._owner[target] = self._owner[mover]
            pages = self._pages[owner]
            pages[pages.index(mover)] = target
        del self._owner[left:]
        if movers:
            source_M, target_M = self._index(movers), self._index(targets)
            for pool in (self._keys, self._values):
                pool[:, target_M] = pool[:, source_M]

    def read(self, slot: int, positions: int) -> Tensor:
        """Copy the pages of the first `positions` of a slot, [2, layers, p, K, P, D]."""
        pages_p = self._index(self._pages[slot][: -(-positions // PAGE)])
        return torch.stack([self._keys[:, pages_p], self._values[:, pages_p]])

    def write(self, slot: int, pages: Tensor, positions: int) -> None:
        """Fill an empty slot with the first `positions` of what `read` gave."""
        self.reserve(slot, positions)
        pages_p = self._index(self._pages[slot])
        self._keys[:, pages_p] = pages[0, :, : len(pages_p)]
        self._values[:, pages_p] = pages[1, :, : len(pages_p)]

    def plan(self, step: Step) -> Plan:
        """Reserve what a pass writes, and lay it out."""
        positions = step.positions_R.tolist()
        for slot, position in zip(step.slots, positions, strict=True):
            self.reserve(slot, position + 1)
        page = [
            self._pages[slot][position // PAGE]
            for slot, position in zip(step.slots, positions, strict=True)
        ]
        offset = [position % PAGE for position in positions]
        parts = []
        for part in step.parts:
            self.reserve(part.slot, part.end)
            places = range(part.start, part.end)
            tokens = slice(len(page), len(page) + len(places))
            page += [self._pages[part.slot][place // PAGE] for place in places]
            offset += [place % PAGE for place in places]
            parts.append((tokens, *self._look_back(part)))
        row_p, mask_b1P = self._rows(step)
        return Plan(
            rows=len(step.slots),
            page_N=self._index(page),
            offset_N=self._index(offset),
            row_p=row_p,
            row_pH=row_p[:, None].expand(-1, self._heads),
            mask_b1P=mask_b1P,
            parts=parts,
        )

    def _look_back(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """A part's pages, and which positions each of its tokens sees."""
        pages_p = self._index(self._pages[part.slot])
        if part.start == 0:
            return pages_p, None
        place_S = torch.arange(part.start, part.end, device=self._device)
        return pages_p, torch.arange(part.end, device=self._device) <= place_S[:, None]

    def _rows(self, step: Step) -> tuple[Tensor, Tensor]:
        """Which row each page belongs to, and where in it that row may look."""
        # Pages of slots that are not decoding take part and are never seen.
        row, first = [0] * len(self._owner), [_NEVER] * len(self._owner)
        for number, slot in enumerate(step.slots):
            for place, page in enumerate(self._pages[slot]):
                row[page], first[page] = number, place * PAGE
        row_p, last_p = self._index(row), self._index(first)
        if step.slots:
            last_p = step.positions_R[row_p] - last_p
        mask_pP = torch.zeros(len(row), PAGE, **self._options)  # type: ignore[call-overload]
        mask_pP.masked_fill_(self._within_P > last_p[:, None], float("-inf"))
        return row_p, mask_pP.repeat_interleave(self._shape[1], 0)[:, None]

    def store(self, layer: int, plan: Plan, keys_NKD: Tensor, values_NKD: Tensor) -> None:
        """Write the keys and values of a pass."""
        self._keys[layer, plan.page_N, :, plan.offset_N] = keys_NKD
        self._values[layer, plan.page_N, :, plan.offset_N] = values_NKD

    def attend(self, layer: int, plan: Plan, queries_NHD: Tensor, out_NE: Tensor) -> None:
        """Write what every token's queries find into `out_NE`, [N, H * D]."""
        if plan.rows:
            out_NE[: plan.rows] = self._decode(layer, plan, queries_NHD[: plan.rows])
        for tokens, pages_p, mask_ST in plan.parts:
            keys_KTD, values_KTD = (
                pool[layer, pages_p].transpose(0, 1).flatten(1, 2)
                for pool in (self._keys, self._values)
            )
            length = tokens.stop - tokens.start if mask_ST is None else mask_ST.shape[1]
            found_HSD = functional.scaled_dot_product_attention(
                queries_NHD[None, tokens].transpose(1, 2),
                keys_KTD[None, :, :length],
                values_KTD[None, :, :length],
                attn_mask=mask_ST,
                is_causal=mask_ST is None,
                enable_gqa=True,
            )
            out_NE[tokens] = found_HSD[0].transpose(0, 1).flatten(1)

    def _decode(self, layer: int, plan: Plan, queries_RHD: Tensor) -> Tensor:
        """One query per row against all pages of the pool; [R, H * D]."""
        rows, heads, size = queries_RHD.shape
        used, kv_heads = len(plan.row_p), self._keys.shape[2]
        batch = used * kv_heads
        keys_bPD = self._keys[layer, :used].flatten(0, 1)
        values_bPD = self._values[layer, :used].flatten(0, 1)
        queries_bGD = queries_RHD.index_select(0, plan.row_p).view(batch, heads // kv_heads, size)
        scores_bGP = torch.baddbmm(plan.mask_b1P, queries_bGD, keys_bPD.mT, alpha=size**-0.5)
        highest_RH = scores_bGP.new_full((rows, heads), float("-inf")).scatter_reduce_(
            0, plan.row_pH, scores_bGP.amax(-1).view(used, heads), "amax"
        )
        scores_bGP -= highest_RH.index_select(0, plan.row_p).view(batch, -1, 1)
        weights_bGP = scores_bGP.exp_()
        sums_RH = scores_bGP.new_zeros(rows, heads).index_add_(
            0, plan.row_p, weights_bGP.sum(-1).view(used, heads)
        )
        found_RE = scores_bGP.new_zeros(rows, heads * size).index_add_(
            0, plan.row_p, torch.bmm(weights_bGP, values_bPD).view(used, heads * size)
        )
        return (found_RE.view(rows, heads, size) / sums_RH[..., None]).view(rows, heads * size)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)
