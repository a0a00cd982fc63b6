"""Tokens and turns as plain data. Enum numbers equal those of the contract.

Types on the append path are NamedTuples: creating one is several times faster than a frozen
dataclass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from seamflow.common.v1 import tokens_pb2

from trajectory_manager.model.records import Outcome

BYTES_PER_TOKEN = 4


class Origin(IntEnum):
    """Who made a span of tokens."""

    ENVIRONMENT = 1
    POLICY = 2


class VersionSource(IntEnum):
    """How the weight version of sampled tokens is known; UNKNOWN is never trained."""

    UNKNOWN = 0
    ENGINE = 1
    SERVER_BOUNDARY = 2


class Span(NamedTuple):
    """`Span` of the contract; spans are contiguous, so their starts are implied."""

    num_tokens: int
    origin: Origin
    weight_version: int = 0
    version_source: VersionSource = VersionSource.UNKNOWN
    server_id: str = ""

    @property
    def trainable(self) -> bool:
        """Whether the loss may count these tokens: sampled, at a known version."""
        return self.origin is Origin.POLICY and self.version_source is not VersionSource.UNKNOWN


class Tokens(NamedTuple):
    """Tokens as they are stored: little-endian arrays of equal length, and spans over them."""

    ids: bytes = b""
    """int32 vocabulary ids."""
    logprobs: bytes = b""
    """float32 log-probabilities."""
    spans: tuple[Span, ...] = ()
    """Contiguous, covering all tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // BYTES_PER_TOKEN

    @property
    def num_bytes(self) -> int:
        return len(self.ids) + len(self.logprobs)

    def cut(self, start: int, stop: int) -> Tokens:
        if start == 0 and stop == self.num_tokens:
            return self
        window = slice(start * BYTES_PER_TOKEN, stop * BYTES_PER_TOKEN)
        spans = tuple(cut_spans(self.spans, start, stop))
        return Tokens(ids=self.ids[window], logprobs=self.logprobs[window], spans=spans)

    def joined(self, other: Tokens) -> Tokens:
        return joined((self, other))

    def fill(self, message: tokens_pb2.PackedTokens) -> tokens_pb2.PackedTokens:
        """Write the tokens into `message`, and return it."""
        message.token_ids, message.logprobs = self.ids, self.logprobs
        start = 0
        for span in self.spans:
            message.spans.add(
                start=start,
                num_tokens=span.num_tokens,
                origin=int(span.origin),
                weight_version=span.weight_version,
                version_source=int(span.version_source),
                server_id=span.server_id,
            )
            start += span.num_tokens
        return message


NO_TOKENS = Tokens()


class Cut(NamedTuple):
    """Own tokens [start, stop) of a turn."""

    turn_id: str
    """The turn that added them."""
    start: int
    """The first."""
    stop: int
    """The one after the last; the turn may have fewer."""


class RoutedExperts(NamedTuple):
    """Experts that a model's routers chose for consecutive tokens: see the contract."""

    start: int
    num_tokens: int
    num_layers: int
    num_chosen: int
    experts: bytes

    def placed(self, first: int, stop: int) -> RoutedExperts | None:
        """The part before token `stop` of its turn, which begins at `first` of a sample."""
        kept = min(stop - self.start, self.num_tokens)
        if kept <= 0:
            return None
        experts = self.experts[: kept * (len(self.experts) // self.num_tokens)]
        return self._replace(start=first + self.start, num_tokens=kept, experts=experts)


def joined(pieces: Iterable[Tokens]) -> Tokens:
    """Tokens one after the other; where pieces meet, equal neighbours become one span."""
    parts = list(pieces)
    if len(parts) == 1:
        return parts[0]
    spans: tuple[Span, ...] = ()
    for part in parts:
        spans = join_spans(spans, part.spans)
    return Tokens(
        ids=b"".join(part.ids for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        spans=spans,
    )


def cut_spans(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """The parts of contiguous `spans` inside [start, stop)."""
    begin = 0
    for span in spans:
        end = begin + span.num_tokens
        length = min(end, stop) - max(begin, start)
        if length > 0:
            yield span._replace(num_tokens=length)
        begin = end


def join_spans(first: Sequence[Span], second: Sequence[Span]) -> tuple[Span, ...]:
    """`first` then `second`; where they meet, equal neighbours become one span."""
    if not first or not second:
        return (*first, *second)
    last, head = first[-1], second[0]
    if last[1:] != head[1:]:
        return (*first, *second)
    merged = last._replace(num_tokens=last.num_tokens + head.num_tokens)
    return (*first[:-1], merged, *second[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFinish:
    rollout_id: str
    credential_digest: str | None
    """Credential of its agent; None: the manager fails it, even if it never started."""
    outcome: Outcome


class Appended(NamedTuple):
    num_tokens: int
    """Tokens of the turn now stored."""
    num_new: int
    """Tokens that were not stored before."""


FINISHED_BY_LENGTH = 2
"""`Turn.finish_reason` of a turn that a limit of tokens ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn: how it first began, where it stands, and its own tokens; names are the contract's."""

    turn_id: str
    attempt_id: str
    prompt_digest: str
    """Digest of the prompt: a turn never changes its prompt."""
    parent_turn_id: str = ""
    prefix_turn_id: str = ""
    prefix_length: int = 0
    num_matched_messages: int = 0
    new_message_keys: tuple[str, ...] = ()
    """Key of each message of the prompt after those; `prefix_tree.message_keys` has them all."""
    num_prompt_tokens: int = 0
    """Tokens of a prompt of ids; 0 for one of messages."""
    template_fingerprint: str = ""
    sampling: str = "{}"
    """Sampling parameters as JSON, defaults left out: see `sampling.py`."""
    epoch: int = 0
    finish_reason: int = 0
    answer_key: str = ""
    """Key of the answer as a message; empty while it runs or for ids."""
    drift: str = ""
    tokens: Tokens = NO_TOKENS
    """Its own tokens; without ids and log-probs where only spans were read."""
    routed: tuple[RoutedExperts, ...] = ()
    """What is recorded for them, in order of the first token; read with whole rollouts only."""

    @property
    def length(self) -> int:
        """Own tokens, also where only spans were read."""
        return sum(span.num_tokens for span in self.tokens.spans)
