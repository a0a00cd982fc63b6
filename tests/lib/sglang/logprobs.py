"""Log-probs of recorded spans, computed again by transformers under the version of each span."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from transformers import AutoModelForCausalLM

_BATCH_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """Tokens that one server sampled under one version, with all that came before them."""

    weight_version: int
    context: tuple[int, ...]
    """Everything before the span and the span itself."""
    logprobs: tuple[float, ...]
    """As recorded: one for each token of the span, the last of `context`."""
    temperature: float
    where: str
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """How recorded log-probs compare with recomputed ones."""

    num_spans: int
    num_tokens: int
    max_difference: float
    worst: str
    """Where the greatest difference is."""


def sampled_spans(trajectories: Iterable[trajectory_pb2.Trajectory]) -> list[SampledSpan]:
    """Every span of every turn that a policy sampled."""
    return [
        span
        for trajectory in trajectories
        for span in _of_turns(trajectory.rollout_id, trajectory.turns)
    ]


def recompute(spans: Iterable[SampledSpan], folder: Callable[[int], Path]) -> Recomputed:
    """Compare all spans; `folder` gives the published weights of a version."""
    by_version: dict[int, list[SampledSpan]] = defaultdict(list)
    for span in spans:
        by_version[span.weight_version].append(span)
    found = [_under_version(folder(version), mine) for version, mine in by_version.items()]
    worst, where = max(found, default=(0.0, ""))
    spans_and_tokens = [(1, len(span.logprobs)) for mine in by_version.values() for span in mine]
    return Recomputed(
        num_spans=sum(one for one, _ in spans_and_tokens),
        num_tokens=sum(tokens for _, tokens in spans_and_tokens),
        max_difference=worst,
        worst=where,
    )


def _of_turns(rollout_id: str, turns: Iterable[trajectory_pb2.Turn]) -> Iterable[SampledSpan]:
    whole: dict[str, tuple[int, ...]] = {}
    for turn in turns:
        before = whole.get(turn.prefix_turn_id, ())[: turn.prefix_length]
        whole[turn.turn_id] = (*before, *turn.tokens.token_ids)
        for span in turn.tokens.spans:
            if span.origin == tokens_pb2.ORIGIN_POLICY:
                end = span.start + span.num_tokens
                yield SampledSpan(
                    weight_version=span.weight_version,
                    context=whole[turn.turn_id][: len(before) + end],
                    logprobs=tuple(turn.tokens.logprobs[span.start : end]),
                    temperature=_temperature(turn.sampling),
                    where=f"{rollout_id}/{turn.turn_id} of {span.server_id} at {span.start}",
                )


def _temperature(sampling: tokens_pb2.SamplingParams) -> float:
    return sampling.temperature if sampling.HasField("temperature") else 1.0


def _under_version(folder: Path, spans: list[SampledSpan]) -> tuple[float, str]:
    """The greatest difference among spans of one version, and where it is."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    spans = sorted(spans, key=lambda span: len(span.context))
    worst = (0.0, "")
    while spans:
        rows = max(1, _BATCH_TOKENS // len(spans[-1].context))
        batch, spans = spans[-rows:], spans[:-rows]
        worst = max(worst, *_differences(model, batch))
    return worst


@torch.inference_mode()
def _differences(model: torch.nn.Module, spans: list[SampledSpan]) -> Iterable[tuple[float, str]]:
    # Padding is on the right of causal attention, so no mask is needed.
    tokens = torch.zeros(len(spans), len(spans[-1].context), dtype=torch.long)
    for row, span in enumerate(spans):
        tokens[row, : len(span.context)] = torch.tensor(span.context)
    logits = model(input_ids=tokens, use_cache=False).logits
    for row, span in enumerate(spans):
        end, start = len(span.context), len(span.context) - len(span.logprobs)
        scaled = logits[row, start - 1 : end - 1] / span.temperature
        mine = scaled.log_softmax(-1).gather(-1, tokens[row, start:end, None])[:, 0]
        difference = (mine - torch.tensor(span.logprobs)).abs().max().item()
        yield difference, span.where
