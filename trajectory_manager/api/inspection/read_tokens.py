"""ReadTokens: a part of a turn's whole sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.rpc import fields
from trajectory_manager.api import conversion, validation
from trajectory_manager.model.prefix_tree import Piece, PrefixTree
from trajectory_manager.model.tokens import Cut, TurnRecord, cut_spans, joined
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.token_store import TokenStore

_DEFAULT_TOKENS, _MAX_TOKENS = 4096, 65_536


async def read_tokens(store: TokenStore, request: pb.ReadTokensRequest) -> pb.ReadTokensResponse:
    """The tokens asked for, as far as the turn has them.

    Raises:
        ServiceError: INVALID_ARGUMENT; NOT_FOUND, of the rollout or of the turn.
    """
    run_id, rollout_id, turn_id = validation.turn_name(
        request.run_id, request.rollout_id, request.turn_id
    )
    start = fields.not_negative("start", request.start)
    number = min(
        fields.not_negative("num_tokens", request.num_tokens) or _DEFAULT_TOKENS, _MAX_TOKENS
    )
    turns = await _turns(store, run_id, rollout_id)
    if turn_id not in turns:
        raise store_error("UNKNOWN_TURN", turn_id)
    tree = PrefixTree([each.turn for each in turns.values()], list(map(_length, turns.values())))
    total = tree.whole_length(turn_id)
    cuts = list(_cuts(tree.pieces(turn_id), start, min(start + number, total)))
    found = await store.windows(run_id, rollout_id, cuts) if cuts else []
    parts = (
        tokens._replace(spans=tuple(cut_spans(turns[cut.turn_id].tokens.spans, *cut[1:])))
        for cut, tokens in zip(cuts, found, strict=True)
    )
    return pb.ReadTokensResponse(tokens=conversion.packed_to(joined(parts)), total=total)


async def _turns(store: TokenStore, run_id: str, rollout_id: str) -> dict[str, TurnRecord]:
    (found,) = await store.read(run_id, [rollout_id], spans_only=True)
    if found is None:
        raise store_error("UNKNOWN_ROLLOUT", rollout_id)
    return {record.turn.turn_id: record for record in found[1]}


def _length(record: TurnRecord) -> int:
    return sum(span.num_tokens for span in record.tokens.spans)


def _cuts(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Cut]:
    """The own tokens of turns that are [start, stop) of a sequence."""
    first = 0
    for piece in pieces:
        cut = Cut(piece.turn_id, max(start - first, 0), min(stop - first, piece.stop))
        if cut.start < cut.stop:
            yield cut
        first += piece.stop
