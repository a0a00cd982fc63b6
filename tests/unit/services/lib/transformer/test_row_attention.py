"""Every kernel of attention within rows has the results and gradients of a plain masked softmax."""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from services.lib.transformer.packing import Packing
from services.lib.transformer.row_attention import varlen_rows
from services.lib.transformer.row_attention.packed_attention import KERNELS, kernels_for, lacking
from services.lib.transformer.row_attention.sdpa_rows import RowKernel, Scores
from services.lib.transformer.row_attention.varlen_rows import RowShape, RowStates

ROWS = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9], [1, 2, 8, 8, 8], [5], [1, 2]]
HEADS, KEY_HEADS, SIZE = 4, 2, 6
CASES: dict[str, tuple[int | None, bool]] = {
    "causal": (None, False),
    "a window": (3, False),
    "sinks": (None, True),
    "a window and sinks": (3, True),
}
EXACT, ROUNDED = 1e-9, 0.03
"""In float64, and in bfloat16, whose precision is 2^-8; relative to the greatest."""


class Plain:
    """What a kernel for rows of any length promises, on any device, by the definition.

    Its backward pass is that of FlashAttention (arXiv 2205.14135, appendix B.2): from the outputs
    and logarithms of sums that it is given, whatever they are.
    """

    def forward(self, states: RowStates, shape: RowShape) -> tuple[Tensor, Tensor]:
        """Row by row."""
        query_JHD, key_JHD, value_JHD = states
        outputs, sums = [], []
        for row in _spans(shape):
            scores_HTT = _scores(query_JHD[row], key_JHD[row], shape)
            value_HTD = _shared(value_JHD[row])
            outputs.append((scores_HTT.softmax(-1) @ value_HTD).transpose(0, 1))
            sums.append(scores_HTT.logsumexp(-1))
        return torch.cat(outputs), torch.cat(sums, 1)

    def backward(
        self,
        gradient_JHD: Tensor,
        states: RowStates,
        output_JHD: Tensor,
        sums_HJ: Tensor,
        shape: RowShape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities are those of the given sums."""
        query_JHD, key_JHD, value_JHD = states
        found = [torch.zeros_like(each) for each in states]
        for row in _spans(shape):
            grad_HTD, output_HTD = (
                each[row].transpose(0, 1) for each in (gradient_JHD, output_JHD)
            )
            scores_HTT = _scores(query_JHD[row], key_JHD[row], shape)
            shares_HTT = (scores_HTT - sums_HJ[:, row, None]).exp()
            of_shares_HTT = grad_HTD @ _shared(value_JHD[row]).mT
            mean_HT1 = (grad_HTD * output_HTD).sum(-1, keepdim=True)
            of_scores_HTT = shape.scale * shares_HTT * (of_shares_HTT - mean_HT1)
            found[0][row] = (of_scores_HTT @ _shared(key_JHD[row])).transpose(0, 1)
            found[1][row] = _summed(of_scores_HTT.mT @ query_JHD[row].transpose(0, 1))
            found[2][row] = _summed(shares_HTT.mT @ grad_HTD)
        return found[0], found[1], found[2]


def _spans(shape: RowShape) -> Iterator[slice]:
    ends = shape.ends.tolist()
    assert ends[0] == 0
    assert shape.longest == max(np.diff(ends))
    return (slice(*span) for span in pairwise(ends))


def _scores(query_THD: Tensor, key_THD: Tensor, shape: RowShape | Scores) -> Tensor:
    """Masked, [H, T, T]."""
    length = len(query_THD)
    scores_HTT = query_THD.transpose(0, 1) @ _shared(key_THD).mT * shape.scale
    seen_TT = torch.ones(length, length, dtype=torch.bool, device=query_THD.device).tril()
    if shape.window is not None:
        seen_TT = seen_TT.triu(1 - shape.window)
    return scores_HTT.masked_fill(~seen_TT, float("-inf"))


def _shared(states_THD: Tensor) -> Tensor:
    """Of each query head, [H, T, D]."""
    return states_THD.repeat_interleave(HEADS // KEY_HEADS, 1).transpose(0, 1)


def _summed(states_HTD: Tensor) -> Tensor:
    """Of each head of keys, [T, H, D]."""
    by_key_head = states_HTD.view(KEY_HEADS, -1, *states_HTD.shape[1:])
    return by_key_head.sum(1).transpose(0, 1)


def packing_of(rows: list[list[int]], device: str) -> Packing:
    """Rows of which some begin alike."""
    lengths_B = np.array([len(row) for row in rows])
    ids_BT = np.zeros((len(rows), lengths_B.max()), np.int32)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row)] = row
    return Packing.of(ids_BT, lengths_B, device)


def expected_rows(
    query_UHD: Tensor, key_UHD: Tensor, value_UHD: Tensor, rows: Packing, scores: Scores
) -> Tensor:
    """By the definition, with a sink as one more column of scores; of any row a token is in."""
    found_UHD = torch.zeros_like(query_UHD)
    for number, row in enumerate(ROWS):
        places = rows.places_BT[number, : len(row)]
        scores_HTT = _scores(query_UHD[places], key_UHD[places], scores)
        if scores.sinks_H is not None:
            sink_HT1 = scores.sinks_H[:, None, None].expand(-1, len(row), 1)
            scores_HTT = torch.cat([scores_HTT, sink_HT1], -1)
        shares_HTT = scores_HTT.softmax(-1)[..., : len(row)]
        output_THD = (shares_HTT @ _shared(value_UHD[places])).transpose(0, 1)
        # Written by several rows, and read once: a token that rows share has one output.
        found_UHD = found_UHD.index_copy(0, places, output_THD)
    return found_UHD


def results(
    kernel: RowKernel, window: int | None, sinks: bool, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """Outputs, and gradients of queries, keys, values and sinks."""
    rows, rng = packing_of(ROWS, device), torch.Generator().manual_seed(0)
    shapes = [(len(rows.token_ids_U), heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    drawn = [torch.randn(each, generator=rng, dtype=torch.float64) for each in (*shapes, (HEADS,))]
    given = [each.to(device, dtype).requires_grad_() for each in drawn]
    scores = Scores(scale=0.7, window=window, sinks_H=given[3] if sinks else None)
    output = kernel(given[0], given[1], given[2], rows, scores)
    weights = torch.linspace(-1, 1, output.numel(), device=device).view_as(output).to(dtype)
    (output * weights).sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach(), *(each.grad for each in given if each.grad is not None)]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The greatest, relative to the greatest of each tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def wide(case: str) -> list[Tensor]:
    """By the definition, in float64."""
    return [each.cpu() for each in results(expected_rows, *CASES[case], "cpu", torch.float64)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_attention(name: str, case: str) -> None:
    """Where its device and type are: else the test says what it lacks."""
    device, dtype = ("cuda", torch.bfloat16) if name == "varlen" else ("cpu", torch.float64)
    if reason := lacking(name, device, dtype):
        pytest.skip(reason)
    found = [each.cpu() for each in results(KERNELS[name], *CASES[case], device, dtype)]
    assert difference(found, wide(case)) < (EXACT if dtype is torch.float64 else ROUNDED)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_any_length_are_given_to_a_kernel_and_sinks_added(case: str) -> None:
    """All that is ours of `varlen`, with a kernel that keeps the promises of FlashAttention."""
    kernel = partial(varlen_rows.varlen_rows, kernel=Plain())
    found = results(kernel, *CASES[case], "cpu", torch.float64)
    assert difference(found, wide(case)) < EXACT


def test_sinks_by_autograd_alone_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: outputs scaled after the kernel, whose sums have no gradient."""

    def scaled(
        query_UHD: Tensor, key_UHD: Tensor, value_UHD: Tensor, rows: Packing, scores: Scores
    ) -> Tensor:
        plain = Scores(scale=scores.scale, window=scores.window)
        output_UHD = varlen_rows.varlen_rows(
            query_UHD, key_UHD, value_UHD, rows, plain, kernel=Plain()
        )
        with torch.no_grad():
            whole = expected_rows(query_UHD, key_UHD, value_UHD, rows, scores)
            share = whole[..., :1] / output_UHD[..., :1]
        return output_UHD * share

    found = results(scaled, None, sinks=True, device="cpu", dtype=torch.float64)
    expected = wide("sinks")
    assert difference(found[:1], expected[:1]) < EXACT
    assert difference(found[1:], expected[1:4]) > 0.05


def test_a_kernel_that_is_not_there_is_refused_by_name() -> None:
    """One that nobody asked for is passed over."""
    assert kernels_for("auto", "cpu", torch.bfloat16) == ["sdpa"]
    with pytest.raises(ValueError, match="attention is 'varlen', but that kernel is for cuda"):
        kernels_for("varlen", "cpu", torch.bfloat16)
