"""The longest stored prefix of a prompt in its rollout, and where the prompt diverges from it.

A turn stores a digest of its whole prompt. A prompt that begins with the same tokens or messages
shares all of it, which the digest proves without reading tokens; only the turn's own tokens remain
to be compared. The usual turn, which continues the newest one, costs one read of its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from trajectory_manager.model.prefix_tree import common_tokens, message_keys
from trajectory_manager.model.tokens import (
    BYTES_PER_TOKEN,
    Origin,
    Tokens,
    Turn,
)
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.token_store import TokenStore

_MAX_DIVERGENT_IDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The stored prefix of a prompt."""

    prefix_turn_id: str = ""
    """Turn that matched; empty if there is none."""
    prefix_length: int = 0
    num_messages: int = 0


class PrefixMatch:
    """The search for one prompt in its rollout. Each turn's tokens are read at most once."""

    def __init__(self, store: TokenStore, new: pb.NewTurn) -> None:
        """`new` has the prompt: int32 ids, or the key of each message."""
        self._store = store
        self._new = new
        self._keys = tuple(new.message_keys.keys)
        self._known: dict[str, Turn] = {}
        self._read: dict[str, Tokens] = {}

    async def match(self) -> Match:
        """The longest match of the prompt on turns with its template.

        With a parent named, only turns on its path match.

        Raises:
            ServiceError: NOT_FOUND for a parent that does not exist.
        """
        if self._new.token_ids:
            newest = await self._store.newest_turn(self._new.run_id, self._new.rollout_id)
            if newest is None and not self._new.parent_turn_id:
                return Match()
            if newest is not None and (match := self._continuation(newest)):
                return match
        await self._learn_turns()
        if self._new.turn_id in self._known:
            return Match()  # begun before: its match is final
        turns = self._candidates()
        if self._keys:
            return await self._match_messages(turns)
        return await self._match_ids(turns)

    async def prefix(self, turn: Turn) -> bytes:
        """int32 ids that a begun turn shares with its prefix turn's whole sequence."""
        length = turn.prefix_length
        if self._new.token_ids:
            return self._new.token_ids[: length * BYTES_PER_TOKEN]
        if not length:
            return b""
        path = await self._path(turn.prefix_turn_id)
        stored = await self._tokens([ancestor.turn_id for ancestor in path])
        prefix = b""
        # From the root: each turn keeps what it shares and adds its own.
        for ancestor, own in zip(reversed(path), reversed(stored), strict=True):
            prefix = prefix[: ancestor.prefix_length * BYTES_PER_TOKEN] + own.ids
        return prefix[: length * BYTES_PER_TOKEN]

    async def divergence(self, turn: Turn) -> pb.Divergence | None:
        """Where the prompt of a begun turn leaves its prefix turn's sampled tokens, or None."""
        position = turn.prefix_length
        given = self._new.token_ids[position * BYTES_PER_TOKEN :]
        if not (position and given):
            return None
        shared = (await self._path(turn.prefix_turn_id))[0]
        (own,) = await self._tokens([shared.turn_id])
        sampled = _sampled_from(own, position - shared.prefix_length)
        if not sampled or common_tokens(sampled, given):
            return None
        ids = sampled[: _MAX_DIVERGENT_IDS * BYTES_PER_TOKEN]
        return pb.Divergence(turn_id=shared.turn_id, position=position, token_ids=ids)

    def _continuation(self, turn: Turn) -> Match | None:
        """The match, if the prompt of ids continues the whole newest turn."""
        own = turn.tokens
        self._known[turn.turn_id], self._read[turn.turn_id] = turn, own
        search = _Search([turn], self._new.token_ids)
        fits = (
            turn.finish_reason
            and own.num_tokens
            and turn.template_fingerprint == self._new.template_fingerprint
            and self._new.parent_turn_id in ("", turn.turn_id)
            and search.next_turns()
        )
        if not fits:
            return None
        search.compare(turn, own)
        whole = turn.prefix_length + own.num_tokens
        if search.shared[turn.turn_id] < whole:
            return None
        return Match(prefix_turn_id=turn.turn_id, prefix_length=whole)

    def _candidates(self) -> list[Turn]:
        """Turns of the same template; with a parent given only those on its path."""
        parent = self._new.parent_turn_id
        if parent and parent not in self._known:
            raise store_error("UNKNOWN_TURN", parent)
        path = {turn.turn_id for turn in self._ancestors(parent)} if parent else self._known
        return [
            turn
            for turn in self._known.values()
            if turn.turn_id in path and turn.template_fingerprint == self._new.template_fingerprint
        ]

    async def _match_messages(self, turns: Sequence[Turn]) -> Match:
        """The finished turn whose conversation is the longest prefix; ties: the newest."""
        keys = tuple(map(_without_reasoning, self._keys))
        digests = _key_digests(keys, map(_num_messages, turns))
        # Needed only to compare reasoning.
        stored = message_keys([*self._known.values()]) if keys != self._keys else {}
        found: Turn | None = None
        for turn in turns:
            length = _num_messages(turn)
            is_prefix = (
                turn.answer_key
                and digests.get(length) == turn.prompt_digest
                and keys[length : length + 1] == (_without_reasoning(turn.answer_key),)
                and self._has_reasoning_of(stored.get(turn.turn_id, ()))
            )
            if is_prefix and (found is None or length >= _num_messages(found)):
                found = turn
        if found is None:
            return Match()
        (own,) = await self._tokens([found.turn_id])
        return Match(
            prefix_turn_id=found.turn_id,
            prefix_length=found.prefix_length + own.num_tokens,
            num_messages=_num_messages(found) + 1,
        )

    def _has_reasoning_of(self, stored: Sequence[str]) -> bool:
        """Whether all keys of the prompt that have a digest of reasoning equal the stored ones."""
        pairs = zip(self._keys, stored, strict=False)
        return all(key == known for key, known in pairs if ":" in key)

    async def _match_ids(self, turns: Sequence[Turn]) -> Match:
        """The turn that shares the longest prefix; ties: the oldest.

        Best first: a turn is read only while no other is known to share more. Turns differ after
        their common prefix, so the others cannot share more. Only where two turns hold the same
        tokens (begun at the same time, or sampled equally by chance) may the result share less.
        """
        search = _Search(turns, self._new.token_ids)
        while batch := search.next_turns():
            stored = await self._tokens([turn.turn_id for turn in batch])
            for turn, own in zip(batch, stored, strict=True):
                search.compare(turn, own)
        best = Match()
        for turn in turns:
            shared = search.shared[turn.turn_id]
            if shared > best.prefix_length:
                best = Match(prefix_turn_id=turn.turn_id, prefix_length=shared)
        return best

    async def _tokens(self, turn_ids: Sequence[str]) -> list[Tokens]:
        unread = [turn_id for turn_id in turn_ids if turn_id not in self._read]
        stored = await self._store.tokens(self._new.run_id, self._new.rollout_id, unread)
        self._read.update(zip(unread, stored, strict=True))
        return [self._read[turn_id] for turn_id in turn_ids]

    async def _path(self, turn_id: str) -> list[Turn]:
        """The turn, its prefix turn, and so on; to the root once all turns are known."""
        if turn_id not in self._known:
            await self._learn_turns()
        return self._ancestors(turn_id)

    def _ancestors(self, turn_id: str) -> list[Turn]:
        path: list[Turn] = []
        while turn_id in self._known:
            path.append(self._known[turn_id])
            turn_id = path[-1].prefix_turn_id
        return path

    async def _learn_turns(self) -> None:
        turns = await self._store.turns(self._new.run_id, self._new.rollout_id)
        self._known = {turn.turn_id: turn for turn in turns}


class _Search:
    """How many tokens of a prompt each turn is known to share, and which turns to read next."""

    def __init__(self, turns: Sequence[Turn], ids: bytes) -> None:
        self._turns = turns
        self._ids = ids
        self._unread = {turn.turn_id: turn for turn in turns}
        self._claims = _claims(turns, ids)
        self.shared = dict.fromkeys(self._unread, 0)
        for turn in reversed(turns):  # children first
            self._raise(turn.turn_id, self._proven(turn))
            parent, prefix = turn.prefix_turn_id, turn.prefix_length
            if parent in self.shared:
                self._raise(parent, min(self.shared[turn.turn_id], prefix))

    def next_turns(self) -> list[Turn]:
        """Unread turns that may share the longest prefix; empty when it is known."""
        for turn in self._turns:  # parents first
            if turn.turn_id in self._unread:
                start = self.shared.get(turn.prefix_turn_id, 0)
                self._raise(turn.turn_id, min(start, turn.prefix_length))
        reach = max(map(self._depth, self.shared), default=0)
        whole = len(self._ids) // BYTES_PER_TOKEN
        return [
            turn
            for name, turn in self._unread.items()
            if self._depth(name) == reach and turn.prefix_length <= self.shared[name] < whole
        ]

    def compare(self, turn: Turn, own: Tokens) -> None:
        """Compare the own tokens of a turn with the prompt."""
        del self._unread[turn.turn_id]
        start = turn.prefix_length
        rest = self._ids[start * BYTES_PER_TOKEN :]
        self.shared[turn.turn_id] = start + common_tokens(rest, own.ids)

    def _depth(self, turn_id: str) -> int:
        claim = self._claims.get(turn_id, 0) if turn_id in self._unread else 0
        return max(self.shared[turn_id], claim)

    def _proven(self, turn: Turn) -> int:
        # Only the prefix it shared when it began: its own tokens may not be stored yet.
        return turn.prefix_length if turn.turn_id in self._claims else 0

    def _raise(self, turn_id: str, shared: int) -> None:
        self.shared[turn_id] = max(self.shared[turn_id], shared)


def prompt_digest(ids: bytes, keys: Sequence[str]) -> str:
    """Equal for equal prompts, whether or not their keys have digests of reasoning."""
    joined = "\0".join(map(_without_reasoning, keys)).encode()
    return hashlib.sha256(ids + b"|" + joined).hexdigest()


def _claims(turns: Sequence[Turn], ids: bytes) -> dict[str, int]:
    """Lengths of the turns' prompts that `ids` begins with, by their digests."""
    digests = _id_digests(ids, (turn.num_prompt_tokens for turn in turns))
    return {
        turn.turn_id: turn.num_prompt_tokens
        for turn in turns
        if digests.get(turn.num_prompt_tokens) == turn.prompt_digest
    }


def _id_digests(ids: bytes, lengths: Iterable[int]) -> dict[int, str]:
    """`prompt_digest` of the first n tokens, for each n of `lengths` in range."""
    whole, start, digests = hashlib.sha256(), 0, dict[int, str]()
    for length in sorted(set(lengths) - {0}):
        stop = length * BYTES_PER_TOKEN
        if stop > len(ids):
            break
        whole.update(ids[start:stop])
        ended = whole.copy()
        ended.update(b"|")
        digests[length], start = ended.hexdigest(), stop
    return digests


def _key_digests(keys: Sequence[str], lengths: Iterable[int]) -> dict[int, str]:
    """`prompt_digest` of the first n messages, for each n of `lengths` in range."""
    whole, required, digests = hashlib.sha256(b"|"), set(lengths), dict[int, str]()
    for length, key in enumerate(keys, 1):
        whole.update(key.encode() if length == 1 else b"\0" + key.encode())
        if length in required:
            digests[length] = whole.hexdigest()
    return digests


def _without_reasoning(key: str) -> str:
    """The digest of the message without its reasoning."""
    return key.partition(":")[0]


def _num_messages(turn: Turn) -> int:
    return turn.num_matched_messages + len(turn.new_message_keys)


def _sampled_from(own: Tokens, start: int) -> bytes:
    """Ids of the sampled tokens from index `start` to the end of their spans."""
    begin, stop = 0, start
    for span in own.spans:
        end = begin + span.num_tokens
        if begin <= stop < end and span.origin is Origin.POLICY:
            stop = end
        begin = end
    return own.cut(start, stop).ids
