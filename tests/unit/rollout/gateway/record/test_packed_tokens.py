"""Cutting and making token records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seamflow.common.v1 import tokens_pb2

from rollout.gateway.record import packed_tokens
from services.lib.token_bytes import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=6)


def record(lengths: list[int]) -> tokens_pb2.PackedTokens:
    """Spans of these lengths: the prompt, then one weight version after the other."""
    spans, start = [], 0
    for version, length in enumerate(lengths):
        origin = tokens_pb2.ORIGIN_POLICY if version else tokens_pb2.ORIGIN_ENVIRONMENT
        spans.append(
            tokens_pb2.Span(
                start=start, num_tokens=length, origin=origin, weight_version=version, server_id="s"
            )
        )
        start += length
    ids = list(range(start))
    logprobs = pack_logprobs([-1.0 * i for i in ids])
    return tokens_pb2.PackedTokens(token_ids=pack_ids(ids), logprobs=logprobs, spans=spans)


def versions(of: tokens_pb2.PackedTokens) -> list[int]:
    """Weight version of each token; fails unless the spans cover them exactly."""
    each: list[int] = []
    for span in of.spans:
        assert (span.start, span.num_tokens > 0) == (len(each), True)
        each += [span.weight_version] * span.num_tokens
    assert len(each) == len(of.token_ids) // 4 == len(of.logprobs) // 4
    return each


@given(lengths=LENGTHS, data=st.data())
def test_after_keeps_ids_logprobs_and_versions_of_the_rest(
    lengths: list[int], data: st.DataObject
) -> None:
    """Cut anywhere: every remaining token keeps its id, log-prob and version."""
    whole = record(lengths)
    start = data.draw(st.integers(0, packed_tokens.num_tokens(whole)))
    rest = packed_tokens.after(whole, start)
    assert rest.token_ids == whole.token_ids[4 * start :]
    assert rest.logprobs == whole.logprobs[4 * start :]
    assert versions(rest) == versions(whole)[start:]


@given(lengths=LENGTHS, data=st.data())
def test_before_and_after_are_the_whole(lengths: list[int], data: st.DataObject) -> None:
    """Cut anywhere: the two parts have all ids, log-probs and versions."""
    whole = record(lengths)
    stop = data.draw(st.integers(0, packed_tokens.num_tokens(whole)))
    head, rest = packed_tokens.before(whole, stop), packed_tokens.after(whole, stop)
    assert head.token_ids + rest.token_ids == whole.token_ids
    assert versions(head) + versions(rest) == versions(whole)


@given(lengths=LENGTHS)
def test_packed_tokens_are_tokens_on_the_wire(lengths: list[int]) -> None:
    """An agent reads numbers where services have bytes."""
    whole = record(lengths)
    numbers = tokens_pb2.Tokens.FromString(whole.SerializeToString())
    assert list(numbers.token_ids) == unpack_ids(whole.token_ids)
    assert list(numbers.logprobs) == unpack_logprobs(whole.logprobs)
    assert numbers.spans == whole.spans
    assert numbers.SerializeToString() == whole.SerializeToString()


@given(lengths=LENGTHS, first=st.integers(0, 5), second=st.integers(0, 5))
def test_cutting_twice_is_cutting_once(lengths: list[int], first: int, second: int) -> None:
    """after(after(t, a), b) == after(t, a + b)."""
    whole = record(lengths)
    twice = packed_tokens.after(packed_tokens.after(whole, first), second)
    assert twice == packed_tokens.after(whole, first + second)


def test_nothing_is_left_after_the_end() -> None:
    """No empty span remains."""
    assert packed_tokens.after(record([2, 3]), 5) == tokens_pb2.PackedTokens()


@pytest.mark.parametrize("ids", [[], [4, 5, 6]])
def test_a_prompt_is_environment_tokens(ids: list[int]) -> None:
    """One span with log-prob 0, and none for no tokens."""
    prompt = packed_tokens.environment(ids)
    assert unpack_ids(prompt.token_ids) == ids
    assert unpack_logprobs(prompt.logprobs) == [0.0] * len(ids)
    assert [(s.num_tokens, s.origin) for s in prompt.spans] == (
        [(3, tokens_pb2.ORIGIN_ENVIRONMENT)] if ids else []
    )
    assert packed_tokens.num_environment(prompt) == len(ids)


def test_the_prompt_ends_at_the_first_sampled_token() -> None:
    """A turn stores its prompt first."""
    assert packed_tokens.num_environment(record([3, 2, 2])) == 3
    assert packed_tokens.num_environment(packed_tokens.after(record([3, 2]), 3)) == 0


@given(lengths=LENGTHS, start=st.integers(0, 5))
def test_joining_undoes_cutting(lengths: list[int], start: int) -> None:
    """Ids, log-probs and the origin of each token are as before."""
    whole = record(lengths)
    head = packed_tokens.after(whole, packed_tokens.num_tokens(whole))
    assert packed_tokens.joined(head, whole) == whole
    tail = packed_tokens.after(whole, start)
    both = packed_tokens.joined(tail, tail)
    assert packed_tokens.after(both, packed_tokens.num_tokens(tail)) == tail
