"""The samples of a leased step for the trainer: fresh ones, then replayed ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from seamflow.trajectory.v1 import sample_service_pb2 as pb

from services.chassis.errors import invalid_argument
from trajectory_manager.api import conversion
from trajectory_manager.api.column_servicer import add_columns
from trajectory_manager.model.records import StalenessPolicy
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.model.steps import StepLease
from trajectory_manager.service import sample_builder
from trajectory_manager.store.redis.connect import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which samples of a step to return."""

    first: int
    """Samples to skip."""
    max_bytes: int
    """Size of the response after which no sample is added; 0: no limit."""


async def fill(
    response: pb.LeaseSamplesResponse,
    store: Store,
    run_id: str,
    lease: StepLease,
    page: Page,
) -> list[int]:
    """Add the samples of a step to `response`, in the ledger's order, as `page` requests.

    Samples are written in place: a step is too large to be copied.

    Returns:
        The staleness of each fresh sample added, in weight versions.
    """
    config = await store.runs.config(run_id)
    names = (*lease.sample_ids, *lease.replayed_ids)
    if page.first > len(names):
        cure = f"next_sample of the answer before; the step has {len(names)} samples"
        raise invalid_argument("first_sample", page.first, cure)
    staleness, num_bytes = list[int](), 0
    async with aclosing(_built(store, run_id, lease, config, names[page.first :])) as built:
        async for sample, replayed in built:
            message = response.samples.add(replayed=replayed)
            conversion.fill_sample(message, sample)
            num_bytes += conversion.add_routed_experts(message, sample)
            if not replayed:
                staleness.append(lease.base_weight_version - sample.min_weight_version)
            num_bytes += sample.tokens.num_bytes + len(sample.loss_mask)
            if 0 < page.max_bytes <= num_bytes:
                break
    end = page.first + len(response.samples)
    response.next_sample = end if end < len(names) or lease.is_open else 0
    await add_columns(store.columns, run_id, response.samples, config.required_columns)
    return staleness


async def _built(
    store: Store, run_id: str, lease: StepLease, config: RunConfig, names: Sequence[str]
) -> AsyncGenerator[tuple[sample_builder.Sample, bool], None]:
    """The samples of a step named in `names`, and whether each is replayed."""
    selected = set(names)
    fresh = replace(lease, sample_ids=_select(lease.sample_ids, selected))
    async for sample in sample_builder.build(store.tokens, run_id, config, fresh):
        yield sample, False
    # Replayed samples are old by design: none of their tokens is masked.
    whole = replace(config, staleness_policy=StalenessPolicy.DROP)
    replayed = replace(lease, sample_ids=_select(lease.replayed_ids, selected))
    async for sample in sample_builder.build(store.tokens, run_id, whole, replayed):
        yield sample, True


def _select(names: Sequence[str], selected: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in selected)
