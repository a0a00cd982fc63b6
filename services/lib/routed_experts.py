"""Routed experts: which experts the routers of a mixture-of-experts model chose for tokens.

The record of a token is of the pass that gave it, as its log-prob is: the pass over the token
before it. So the first token of a sequence has none, and a sampled token's is complete with it.

Shape suffixes: T tokens, L layers, K chosen experts.
"""
# ruff: noqa: N806, N815 -- arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from seamflow.common.v1 import tokens_pb2

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class RoutingShape(NamedTuple):
    """What the routers of a model choose."""

    num_layers: int
    """Layers of the model, also those without routed experts."""
    num_chosen: int
    """Experts that a router chooses for a token."""
    num_experts: int
    """Experts of a layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of recorded ids: the smallest that holds them and `none`."""
        return np.dtype("u1" if self.num_experts < 256 else "<u2")

    @property
    def none(self) -> int:
        """Stands for no record: the greatest number of the type."""
        return int(np.iinfo(self.dtype).max)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's record."""
        return self.num_layers * self.num_chosen * self.dtype.itemsize

    def empty(self, num_tokens: int) -> NDArray[Any]:
        """No record of so many tokens, [T, L, K]."""
        return np.full((num_tokens, *self[:2]), self.none, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRecord:
    """The experts of consecutive tokens."""

    start: int
    """Index of the first token in its sequence."""
    experts_TLK: NDArray[Any]
    """Expert ids, in the type of their `RoutingShape`."""

    def parts(self, max_bytes: int) -> list[ExpertRecord]:
        """The same in parts of at most about so many bytes."""
        rows = max(1, max_bytes // max(1, self.experts_TLK[:1].nbytes))
        return [
            ExpertRecord(start=self.start + at, experts_TLK=self.experts_TLK[at : at + rows])
            for at in range(0, len(self.experts_TLK), rows)
        ]

    def message(self) -> tokens_pb2.RoutedExperts:
        num_tokens, num_layers, num_chosen = self.experts_TLK.shape
        return tokens_pb2.RoutedExperts(
            start=self.start,
            num_tokens=num_tokens,
            num_layers=num_layers,
            num_chosen=num_chosen,
            experts=self.experts_TLK.tobytes(),
        )


def routing_shape(config: Mapping[str, Any]) -> RoutingShape | None:
    """The shape by a model's config.json, or its text part; None: it has no routed experts."""
    number = next((config[name] for name in _EXPERTS if config.get(name)), 0)
    chosen = config.get("num_experts_per_tok")
    if not number or not chosen:
        return None
    return RoutingShape(int(config["num_hidden_layers"]), int(chosen), int(number))


def read_records(
    records: Iterable[tokens_pb2.RoutedExperts], shape: RoutingShape, num_tokens: int
) -> NDArray[Any]:
    """Records over a sequence as one array, [T, L, K]; of two for one token the first counts.

    Raises:
        ValueError: a record is of another shape, lies outside of the sequence, or names an expert
            that the model does not have.
    """
    experts_TLK = shape.empty(num_tokens)
    for record in records:
        found_TLK = _decoded(record, shape)
        window = experts_TLK[record.start : record.start + record.num_tokens]
        if record.start < 0 or len(window) != len(found_TLK):
            raise ValueError(
                f"routed experts cover the tokens {record.start} to "
                f"{record.start + record.num_tokens}, the sequence has {num_tokens}"
            )
        window[...] = np.where(window == shape.none, found_TLK, window)
    greatest = int(np.where(experts_TLK == shape.none, 0, experts_TLK).max(initial=0))
    if greatest >= shape.num_experts:
        raise ValueError(
            f"routed experts name expert {greatest}, a layer of the model has {shape.num_experts}: "
            "check that the engine samples from the model that is trained"
        )
    return experts_TLK


def _decoded(record: tokens_pb2.RoutedExperts, shape: RoutingShape) -> NDArray[Any]:
    of = record.num_layers, record.num_chosen
    if of != shape[:2] or len(record.experts) != record.num_tokens * shape.token_bytes:
        raise ValueError(
            f"routed experts are of {of[0]} layers with {of[1]} choices and have "
            f"{len(record.experts)} bytes for {record.num_tokens} tokens, the model needs "
            f"{shape.num_layers} layers, {shape.num_chosen} choices and {shape.token_bytes} bytes "
            "a token: check that the engine samples from the model that is trained"
        )
    return np.frombuffer(record.experts, shape.dtype).reshape(-1, *shape[:2])
