"""Sampling parameters as they are stored with a turn: JSON, equal for equal parameters.

Parameters at their default are left out; those of the same name have the same meaning as in
`SamplingParams` of the contract.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

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
