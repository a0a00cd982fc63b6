"""Small operations on `common.v1.Tokens`."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from seamflow.common.v1 import tokens_pb2

__all__ = ["after", "environment", "extend", "joined", "num_environment", "packed"]


def environment(token_ids: Sequence[int]) -> tokens_pb2.Tokens:
    """Prompt tokens as one environment span; log-prob 0."""
    span = tokens_pb2.Span(start=0, num_tokens=len(token_ids), origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    return tokens_pb2.Tokens(
        token_ids=token_ids, logprobs=[0.0] * len(token_ids), spans=[span] if token_ids else []
    )


def num_environment(tokens: tokens_pb2.Tokens) -> int:
    """Tokens before the first sampled one; a turn stores its prompt first."""
    policy = (s.start for s in tokens.spans if s.origin == tokens_pb2.ORIGIN_POLICY)
    return next(policy, len(tokens.token_ids))


def after(tokens: tokens_pb2.Tokens, start: int) -> tokens_pb2.Tokens:
    """The tokens from index `start`, with spans counted from there."""
    rest = tokens_pb2.Tokens(token_ids=tokens.token_ids[start:], logprobs=tokens.logprobs[start:])
    for span in tokens.spans:
        end = span.start + span.num_tokens
        if end > start:
            kept = rest.spans.add()
            kept.CopyFrom(span)
            kept.start = max(span.start - start, 0)
            kept.num_tokens = end - max(span.start, start)
    return rest


def extend(tokens: tokens_pb2.Tokens, more: tokens_pb2.Tokens) -> None:
    """Append `more` to `tokens`, in place."""
    start = len(tokens.token_ids)
    tokens.token_ids.extend(more.token_ids)
    tokens.logprobs.extend(more.logprobs)
    for span in more.spans:
        moved = tokens.spans.add()
        moved.CopyFrom(span)
        moved.start += start


def joined(first: tokens_pb2.Tokens, second: tokens_pb2.Tokens) -> tokens_pb2.Tokens:
    """Concatenation, with all spans counted from the start of `first`."""
    whole = tokens_pb2.Tokens()
    whole.CopyFrom(first)
    extend(whole, second)
    return whole


def packed(tokens: tokens_pb2.Tokens) -> tokens_pb2.PackedTokens:
    """The same tokens as little-endian bytes."""
    return tokens_pb2.PackedTokens(
        token_ids=_bytes(array("i", tokens.token_ids)),
        logprobs=_bytes(array("f", tokens.logprobs)),
        spans=tokens.spans,
    )


def _bytes(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
