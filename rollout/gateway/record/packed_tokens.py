"""Small operations on `common.v1.PackedTokens`."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from seamflow.common.v1 import tokens_pb2

from services.lib.token_bytes import BYTES_PER_TOKEN, pack_ids

Packed = tokens_pb2.PackedTokens
Spans = RepeatedCompositeFieldContainer[tokens_pb2.Span]


def num_tokens(tokens: Packed) -> int:
    return len(tokens.token_ids) // BYTES_PER_TOKEN


def environment(token_ids: Sequence[int]) -> Packed:
    """Prompt tokens as one environment span; log-prob 0."""
    ids = pack_ids(token_ids)
    span = tokens_pb2.Span(num_tokens=len(token_ids), origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    return Packed(token_ids=ids, logprobs=bytes(len(ids)), spans=[span] if ids else [])


def num_environment(tokens: Packed) -> int:
    """Tokens before the first sampled one; a turn stores its prompt first."""
    policy = (s.start for s in tokens.spans if s.origin == tokens_pb2.ORIGIN_POLICY)
    return next(policy, num_tokens(tokens))


def after(tokens: Packed, start: int) -> Packed:
    """The tokens from index `start`, with spans counted from there."""
    return _cut(tokens, start, num_tokens(tokens))


def before(tokens: Packed, stop: int) -> Packed:
    """The tokens up to index `stop`."""
    return _cut(tokens, 0, stop)


def extend_spans(spans: Spans, more: Spans, start: int) -> None:
    """Append `more` to `spans`, in place; `start` tokens come before them."""
    for span in more:
        moved = spans.add()
        moved.CopyFrom(span)
        moved.start += start


def joined(first: Packed, second: Packed) -> Packed:
    """Concatenation, with all spans counted from the start of `first`."""
    whole = Packed(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        spans=first.spans,
    )
    extend_spans(whole.spans, second.spans, num_tokens(first))
    return whole


def _cut(tokens: Packed, start: int, stop: int) -> Packed:
    window = slice(start * BYTES_PER_TOKEN, stop * BYTES_PER_TOKEN)
    cut = Packed(token_ids=tokens.token_ids[window], logprobs=tokens.logprobs[window])
    for span in tokens.spans:
        first, end = max(span.start, start), min(span.start + span.num_tokens, stop)
        if end > first:
            kept = cut.spans.add()
            kept.CopyFrom(span)
            kept.start, kept.num_tokens = first - start, end - first
    return cut
