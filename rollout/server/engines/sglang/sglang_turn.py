"""One turn on an SGLang server: the requests it takes, and how their messages become chunks.

A turn outlives its requests. Each pause ends the request that runs, and after it the turn continues
as a new request from its longer prefix: so all tokens of a request have one weight version, that
of its start. Only a pause in place keeps a request across new weights; its tokens are then held
back until the engine's last message has the version each was sampled under.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.server.engines.engine import (
    Chunk,
    EngineError,
    EngineFailed,
    EngineInfo,
    EngineRequest,
    FinishReason,
    RequestError,
    VersionSource,
    check_request,
)
from services.chassis import metrics
from services.lib.routed_experts import ExpertRecord, RoutingShape

_MISMATCHES = metrics.counter(
    "rollout_server",
    "weight_version_mismatches_total",
    "Chunks for which the engine named another weight version than this server had loaded.",
)


@dataclass(frozen=True, slots=True)
class Weights:
    """A weight version, the label under which the engine reports it, and its files."""

    version: int
    label: str
    folder: Path


def check_sampled(request: EngineRequest, info: EngineInfo) -> None:
    """Raise `RequestError` for a request that this server cannot sample."""
    check_request(request, info)
    seed = request.sampling.seed
    if seed is not None and "seed" not in info.features:
        cure = "SGLang keeps a seed with --sglang-enable-deterministic-inference only"
        raise RequestError("seed", seed, cure)


class Turn:
    """One call of `generate`: its tokens, its budget, and the chunks its caller has yet to take."""

    def __init__(
        self,
        request: EngineRequest,
        info: EngineInfo,
        weights: Weights,
        routing: RoutingShape | None = None,
    ) -> None:
        """Begin without a request to SGLang.

        Args:
            request: has passed `check_sampled`.
            info: of the engine.
            weights: loaded now.
            routing: of recorded experts; None: they are not recorded.
        """
        self._experts = TurnExperts(request.routed_from, routing)
        self._weights = weights
        self._sampling = request.sampling
        self._token_ids = list(request.token_ids)
        longest = len(request.token_ids) + request.sampling.max_new_tokens
        self._end = min(longest, info.max_context)
        eos = () if request.sampling.ignore_eos else info.eos_token_ids
        self._stops = frozenset((*request.sampling.stop_token_ids, *eos))
        self._chunks: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()
        self.rid: str | None = None
        """The request that runs now; None between requests."""
        self.ended = False
        """Whether nothing more will be handed out."""

    def request(self, weights: Weights) -> dict[str, Any]:
        """Begin the next request, sampled under `weights`; returns its body."""
        # SGLang aborts every request whose id begins with the one it is given.
        self.rid = uuid.uuid4().hex
        self._weights = weights
        self._received = 0
        self._held: list[tuple[int, float]] | None = None
        sampling = self._sampling
        return {
            "rid": self.rid,
            "input_ids": self._token_ids,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "max_new_tokens": self._end - len(self._token_ids),
                "ignore_eos": sampling.ignore_eos,
                "stop_token_ids": sorted(self._stops),
                "sampling_seed": sampling.seed,
            },
            "return_logprob": True,
            "stream": True,
            # Splits the prefix cache: no request starts from keys and values of other weights.
            "extra_key": weights.label,
            **self._experts.asked(),
        }

    def hold(self) -> None:
        """Keep back what comes from now on until the request ends and names its versions."""
        if self.rid is not None and self._held is None:
            self._held = []

    def receive(self, message: dict[str, Any]) -> int:
        """Take a message of the request; returns how many tokens it brought.

        Raises `EngineError` for a request that SGLang refuses, `EngineFailed` for a stream that
        makes no sense.
        """
        if self.ended:
            return 0
        if "meta_info" not in message:
            raise EngineError(f"SGLang refused a request: {message.get('error')}")
        meta = message["meta_info"]
        finish = _finish(meta["finish_reason"])
        # The last `new` of what is there. That is right for increments, for servers that repeat
        # all tokens in every message, and for a request aborted in the queue, which repeats one.
        new: int = meta.get("completion_tokens", self._received) - self._received
        ids: list[int] = message["output_ids"][-new:] if new else []
        triples = meta["output_token_logprobs"][-new:] if new else []
        if not len(ids) == len(triples) == new:
            raise EngineFailed(
                f"SGLang counts {new} new tokens, but sent {len(ids)} ids, {len(triples)} log-probs"
            )
        self._received += new
        self._experts.receive(meta)
        self._take(ids, [triple[0] for triple in triples], meta, finish)
        return new

    def _take(
        self,
        ids: list[int],
        logprobs: list[float],
        meta: dict[str, Any],
        finish: FinishReason | None,
    ) -> None:
        spans = meta.get("weight_versions")
        if self._held is not None:
            self._held += zip(ids, logprobs, strict=True)
            # Without spans their versions stay unknown: the turn continues from before them.
            if meta["finish_reason"] is None or not spans:
                return
            ids = [token_id for token_id, _ in self._held]
            logprobs = [logprob for _, logprob in self._held]
        first = self._received - len(ids)
        # A request aborted in the step that samples its stop token does not say so, and one that
        # ignores end-of-sequence ignores all stop ids: so they are looked for here.
        if not self._stops.isdisjoint(ids):
            count = next(n for n, token_id in enumerate(ids, 1) if token_id in self._stops)
            ids, finish = ids[:count], FinishReason.STOP
        self._token_ids += ids
        if finish is None and len(self._token_ids) >= self._end:
            finish = FinishReason.LENGTH
        cuts = _cuts(spans, first, len(ids)) if spans else [(len(ids), meta["weight_version"])]
        self._put(ids, logprobs, cuts, finish, by_engine=spans is not None)

    def _put(
        self,
        ids: list[int],
        logprobs: list[float],
        cuts: list[tuple[int, str]],
        finish: FinishReason | None,
        *,
        by_engine: bool,
    ) -> None:
        """Hand tokens out, one chunk for each (end, label) of `cuts`."""
        start = 0
        for end, label in cuts:
            version, source = self._weights.version, VersionSource.SERVER_BOUNDARY
            if label != self._weights.label:
                version = self._version_of(label)
            if by_engine or label != self._weights.label:
                source = VersionSource.ENGINE
            last = finish if (end, label) == cuts[-1] else None
            if start < end or last is not None:
                chunk = Chunk(
                    token_ids=tuple(ids[start:end]),
                    logprobs=tuple(logprobs[start:end]),
                    weight_version=version,
                    version_source=source,
                    finish=last,
                    routed=self._experts.taken(len(self._token_ids)) if end == len(ids) else None,
                )
                self._chunks.put_nowait(chunk)
            start = end
        self.ended = finish is not None

    def _version_of(self, label: str) -> int:
        """Trust the engine's label, and count the mismatch unless tokens were held for it."""
        if self._held is None:
            _MISMATCHES.inc()
        if not label.isdecimal():
            raise EngineFailed(f"SGLang sampled under weights {label!r}, which are not ours")
        return int(label)

    def interrupt(self) -> None:
        """End the turn `INTERRUPTED` with what it has."""
        if not self.ended:
            self.ended = True
            self._chunks.put_nowait(
                Chunk(
                    token_ids=(),
                    logprobs=(),
                    weight_version=self._weights.version,
                    finish=FinishReason.INTERRUPTED,
                    routed=self._experts.taken(len(self._token_ids)),
                )
            )

    def fail(self, error: EngineError) -> None:
        if not self.ended:
            self.ended = True
            self._chunks.put_nowait(error)

    async def next_chunk(self) -> Chunk:
        """Wait for the next chunk. Raises the `EngineError` the turn has failed with."""
        chunk = await self._chunks.get()
        if isinstance(chunk, EngineError):
            raise chunk
        return chunk


def _finish(reason: dict[str, Any] | None) -> FinishReason | None:
    """Return how a request ended; None while it runs, and when it was aborted."""
    kind = reason["type"] if reason else None
    if reason is None or kind == "length":
        return FinishReason.LENGTH if reason else None
    if kind == "stop":
        if isinstance(reason.get("matched"), str):
            # No stop strings are ever asked for: this is how SGLang reports logits that are NaN.
            raise EngineFailed(f"SGLang stopped a request: {reason['matched']}")
        return FinishReason.STOP
    if reason.get("status_code") == 400:
        raise EngineError(f"SGLang refused a request: {reason.get('message')}")
    return None


def _cuts(spans: list[dict[str, Any]], first: int, count: int) -> list[tuple[int, str]]:
    """Return where versions end in `count` tokens that begin `first` tokens into the request."""
    cuts = [
        (min(span["end"] - first, count), span["version"])
        for span in spans
        if span["end"] > first and span["start"] < first + count
    ]
    return cuts or [(count, spans[-1]["version"])]


class TurnExperts:
    """What is asked for, and what has come and is not handed out."""

    def __init__(self, first: int | None, routing: RoutingShape | None) -> None:
        """`first`: token to begin with; None: nothing is asked for."""
        self._routing = None if first is None else routing
        self._next = max(first or 0, 1)  # the first token has none
        self._parts: list[ExpertRecord] = []

    def asked(self) -> dict[str, Any]:
        """Fields of the body of the next request."""
        if self._routing is None:
            return {}
        return {"return_routed_experts": True, "routed_experts_start_len": self._next - 1}

    def receive(self, meta: dict[str, Any]) -> None:
        """Take those of a message. Raises `EngineFailed` if they are of another model."""
        encoded = meta.get("routed_experts")
        if self._routing is None or encoded is None:
            return
        ids = np.frombuffer(base64.b64decode(encoded), "<i4")
        if ids.size % (self._routing.num_layers * self._routing.num_chosen):
            raise EngineFailed(
                f"SGLang returned {ids.size} routed experts, the model has "
                f"{self._routing.num_layers} layers with {self._routing.num_chosen} choices"
            )
        known = (ids >= 0) & (ids < self._routing.num_experts)
        experts = np.where(known, ids, self._routing.none).astype(self._routing.dtype)
        experts_tlk = experts.reshape(-1, *self._routing[:2])
        self._parts.append(ExpertRecord(start=self._next, experts_TLK=experts_tlk))
        self._next += len(experts_tlk)

    def taken(self, num_tokens: int) -> ExpertRecord | None:
        """What has come, up to the last of so many tokens of the turn; None: nothing."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        start = parts[0].start
        experts_tlk = np.concatenate([part.experts_TLK for part in parts])[: num_tokens - start]
        return ExpertRecord(start=start, experts_TLK=experts_tlk) if len(experts_tlk) else None
