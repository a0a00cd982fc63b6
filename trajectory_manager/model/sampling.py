"""Sampling parameters as they are stored with a turn: JSON, equal for equal parameters.

Parameters at their default are left out; those of the same name have the same meaning as in
`SamplingParams` of the contract.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from seamflow.common.v1 import tokens_pb2

from services.chassis.errors import ServiceError, invalid_argument

Value = float | int | bool | list[int] | list[str]

DEFAULTS: Mapping[str, Value] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_new_tokens": 256,
    "stop_token_ids": [],
    "ignore_eos": False,
    "min_p": 0.0,
    "stop": [],
}
"""By parameter; the default of `seed` is that it is absent."""


def encode(params: Mapping[str, Value]) -> str:
    """The JSON of `params`, without those at their default."""
    kept = {name: value for name, value in params.items() if DEFAULTS.get(name) != value}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def decode(stored: str) -> dict[str, Value]:
    """The parameters that `encode` stored; those of newer releases are left out."""
    found: dict[str, Value] = json.loads(stored)
    return {name: value for name, value in found.items() if name in DEFAULTS or name == "seed"}


def temperature(stored: str) -> float:
    """The temperature among stored parameters."""
    found = decode(stored).get("temperature", DEFAULTS["temperature"])
    assert isinstance(found, float | int), "a temperature is a number"
    return float(found)


_MAX_STOP_IDS = 64
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256


def stored(field: str, message: tokens_pb2.SamplingParams) -> str:
    """The JSON that is equal for equal parameters; absent ones count as their defaults.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    encoded = message.SerializeToString()
    return _stored(field, encoded) if encoded else "{}"


# Cached: most turns of a run have the same parameters.
@lru_cache(maxsize=1024)
def _stored(field: str, encoded: bytes) -> str:
    message = tokens_pb2.SamplingParams.FromString(encoded)
    params: dict[str, Value] = {
        descriptor.name: value for descriptor, value in message.ListFields()
    }
    _check_numbers(field, message)
    # Their order means nothing.
    params["stop_token_ids"] = sorted(set(message.stop_token_ids))
    params["stop"] = sorted(set(message.stop))
    _check_stops(field, message.stop_token_ids, message.stop)
    return encode(params)


def message(stored_params: str) -> tokens_pb2.SamplingParams:
    """The message of stored parameters."""
    return tokens_pb2.SamplingParams.FromString(_encoded(stored_params))


@lru_cache(maxsize=1024)
def _encoded(stored_params: str) -> bytes:
    found = tokens_pb2.SamplingParams(**decode(stored_params))  # type: ignore[arg-type]
    return found.SerializeToString()


def _check_numbers(field: str, params: tokens_pb2.SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise invalid_argument(f"{field}.temperature", params.temperature, "at least 0")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        raise invalid_argument(f"{field}.top_p", params.top_p, "more than 0, at most 1")
    if params.top_k < 0:
        raise invalid_argument(f"{field}.top_k", params.top_k, "at least 0; 0 is off")
    if params.HasField("max_new_tokens") and params.max_new_tokens < 1:
        raise invalid_argument(f"{field}.max_new_tokens", params.max_new_tokens, "at least 1")
    if not 0 <= params.min_p <= 1:
        raise invalid_argument(f"{field}.min_p", params.min_p, "between 0 and 1")


def _check_stops(field: str, ids: Sequence[int], strings: Sequence[str]) -> None:
    if len(ids) > _MAX_STOP_IDS:
        raise _too_many(f"{field}.stop_token_ids", len(ids), _MAX_STOP_IDS)
    if len(strings) > _MAX_STOPS:
        raise _too_many(f"{field}.stop", len(strings), _MAX_STOPS)
    for text in strings:
        if not 1 <= len(text) <= _MAX_STOP_CHARACTERS:
            cure = f"1 to {_MAX_STOP_CHARACTERS} characters"
            raise invalid_argument(f"{field}.stop", text[:40], cure)


def _too_many(field: str, number: int, bound: int) -> ServiceError:
    return invalid_argument(field, f"{number} entries", f"at most {bound}")
