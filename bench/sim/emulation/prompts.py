"""What emulated agents say, so that an emulated engine knows how long its answer is.

    ... environment tokens, MARK, rollout (4 digits), answer's length (3 digits) | answer ...

One recorded token stands for `thinning` tokens of the emulated model, so the control plane has as
many turns and messages as that model would give it, and fewer tokens in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.simulator.decoding import Work

ANSWER, _ENVIRONMENT, _MARK = 1, 2, 3
_ZERO, _BASE = 16, 128
"""Digits are ids from 16 on, the greatest first."""
VOCABULARY = _ZERO + _BASE
_HEADER = 1 + 4 + 3


def recorded(tokens: int, thinning: int) -> int:
    """Recorded tokens that stand for `tokens` of the model; at least one."""
    return -(-tokens // thinning)


def prompt(new_tokens: int, rollout: int, output_tokens: int, thinning: int) -> list[int]:
    """Tokens that come before a turn; together they stand for `new_tokens`, if those are many."""
    filler = max(recorded(new_tokens, thinning) - _HEADER, 0)
    length = recorded(output_tokens, thinning)
    return [_ENVIRONMENT] * filler + [_MARK, *_digits(rollout, 4), *_digits(length, 3)]


def work(token_ids: Sequence[int], thinning: int) -> Work:
    """What an engine has to do that continues `token_ids`.

    Raises:
        ValueError: they are not what an emulated agent says.
    """
    mark = _last(token_ids, _MARK)
    begin = mark + _HEADER
    if mark < 0 or len(token_ids) < begin:
        raise ValueError("token_ids hold no mark of an emulated agent: the engine is emulated")
    sampled = len(token_ids) - begin
    fresh = 0 if sampled else begin - 1 - _last(token_ids, ANSWER)
    return Work(
        rollout=_number(token_ids[mark + 1 : mark + 5]),
        context=begin * thinning,
        tokens=_number(token_ids[mark + 5 : begin]) * thinning,
        fresh=fresh * thinning,
        sampled=sampled * thinning,
    )


def _digits(number: int, count: int) -> list[int]:
    return [_ZERO + number // _BASE**place % _BASE for place in range(count - 1, -1, -1)]


def _number(digits: Sequence[int]) -> int:
    number = 0
    for digit in digits:
        number = number * _BASE + digit - _ZERO
    return number


def _last(token_ids: Sequence[int], wanted: int) -> int:
    for index in range(len(token_ids) - 1, -1, -1):
        if token_ids[index] == wanted:
            return index
    return -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """How the emulated hardware relates to this machine; `emulation.json` in the model's folder."""

    speed: float
    """Emulated seconds in a second."""
    thinning: int
    """Tokens of the model that a recorded token stands for."""
    starts: tuple[int, ...] = ()
    """Groups at which the trainer's steps start, in turn; 0: as the scheduler computes. Empty: as
    the trainer is configured."""
    work: tuple[float, ...] = ()
    """What a token costs the gang in each step, in turn, in what it costs by the cost model. Empty:
    always that."""
