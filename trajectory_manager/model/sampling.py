"""Sampling parameters as they are stored with a turn: JSON, equal for equal parameters.

Parameters at their default are left out; those of the same name have the same meaning as in
`SamplingParams` of the contract.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from seamflow.common.v1 import tokens_pb2

from services.lib.bounds import check_sampling

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
    found = decode(stored).get("temperature", DEFAULTS["temperature"])
    assert isinstance(found, float | int), "a temperature is a number"
    return float(found)


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
    check_sampling(field, message)
    params: dict[str, Value] = {
        descriptor.name: value for descriptor, value in message.ListFields()
    }
    # Their order means nothing.
    params["stop_token_ids"] = sorted(set(message.stop_token_ids))
    params["stop"] = sorted(set(message.stop))
    return encode(params)


def message(stored_params: str) -> tokens_pb2.SamplingParams:
    return tokens_pb2.SamplingParams.FromString(_encoded(stored_params))


@lru_cache(maxsize=1024)
def _encoded(stored_params: str) -> bytes:
    found = tokens_pb2.SamplingParams(**decode(stored_params))  # type: ignore[arg-type]
    return found.SerializeToString()
