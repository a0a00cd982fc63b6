"""Impossible answers: what no working rollout server sends."""

from __future__ import annotations

import re
from math import isfinite

from seamflow.common.v1 import tokens_pb2

from rollout.gateway.record import packed_tokens
from services.lib.token_bytes import unpack_ids, unpack_logprobs

_MOST_LOGPROB = 1e-3
"""Log-probs are at most 0, but for rounding."""
_LEAST_LOGPROB = -3e38
_SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,199}")
_SOURCES = frozenset(tokens_pb2.VersionSource.values())


def fault_of(tokens: tokens_pb2.PackedTokens, vocabulary_size: int, most: int) -> str:
    """What is impossible about tokens of which at most `most` were asked for; else empty."""
    number = packed_tokens.num_tokens(tokens)
    if len(tokens.token_ids) % 4 or len(tokens.logprobs) != len(tokens.token_ids):
        return f"{len(tokens.token_ids)} bytes of ids with {len(tokens.logprobs)} of log-probs"
    if number > most:
        return f"{number} tokens where at most {most} were asked for"
    return (
        _fault_of_ids(tokens.token_ids, vocabulary_size)
        or _fault_of_logprobs(tokens.logprobs)
        or _fault_of_spans(tokens, number)
    )


def _fault_of_ids(packed: bytes, vocabulary_size: int) -> str:
    ids = unpack_ids(packed)
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocabulary_size:
            return f"token id {token_id} where the model's are 0 … {vocabulary_size - 1}"
    return ""


def _fault_of_logprobs(packed: bytes) -> str:
    logprobs = unpack_logprobs(packed)
    # NaN and infinity propagate to the sum.
    extremes = min(logprobs, default=0.0), max(logprobs, default=0.0), sum(logprobs)
    if extremes[0] >= _LEAST_LOGPROB and extremes[1] <= _MOST_LOGPROB and isfinite(extremes[2]):
        return ""
    bad = next(each for each in logprobs if not _LEAST_LOGPROB <= each <= _MOST_LOGPROB)
    return f"log-prob {bad:g}, which must be finite and at most 0"


def _fault_of_spans(tokens: tokens_pb2.PackedTokens, number: int) -> str:
    end = 0
    for span in tokens.spans:
        if span.start != end or span.num_tokens < 1 or not _is_known(span):
            return f"a false span [{span.start}, {span.start + span.num_tokens})"
        end += span.num_tokens
    return "" if end == number else f"spans of {end} tokens for {number}"


def _is_known(span: tokens_pb2.Span) -> bool:
    return (
        span.origin == tokens_pb2.ORIGIN_POLICY
        and span.weight_version >= 0
        and span.version_source in _SOURCES
        and (not span.server_id or _SERVER_ID.fullmatch(span.server_id) is not None)
    )
