"""The files of a weight version, and who gathers which: known from names and shapes alone.

Every rank makes the same plan. Tensors that are converted together, such as the parts of fused
experts, are a group; groups fill buckets in order, and each bucket is one safetensors file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Gives tensors of a model by their names in a model folder."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ONLY = "model.safetensors"
_LEAST_BUCKETS, _LEAST_BYTES = 16, 16 << 20
_MAX_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a tensor, which one rank has."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor of the model that is published."""

    name: str
    """Among the model's modules."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """As it is published."""
    parts: tuple[Part, ...]
    """All its elements, in order."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def meta(self) -> torch.Tensor:
        """One like it, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors that are converted together."""

    sources: tuple[Source, ...]
    targets: tuple[str, ...]
    """Their names in the file."""

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    @property
    def home(self) -> int | None:
        """The rank that has all of it; None: several have parts."""
        ranks = {part.rank for source in self.sources for part in source.parts}
        return ranks.pop() if len(ranks) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The groups of one file."""

    file: str
    owner: int
    """The rank that gathers, converts, writes and sends it."""
    groups: tuple[Group, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for group in self.groups for source in group.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """The buckets of a version, in the order in which they are gathered."""

    buckets: tuple[Bucket, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for bucket in self.buckets for source in bucket.sources)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that have a part of something or a bucket."""
        owners = frozenset(bucket.owner for bucket in self.buckets)
        return owners | {part.rank for source in self.sources for part in source.parts}

    @property
    def exchanges(self) -> bool:
        """Whether a rank needs parts of another one."""
        return any(group.home is None for bucket in self.buckets for group in bucket.groups)

    @property
    def index(self) -> dict[str, Any] | None:
        """The content of model.safetensors.index.json; None: there is one file."""
        if len(self.buckets) == 1:
            return None
        names = {
            name: bucket.file
            for bucket in self.buckets
            for group in bucket.groups
            for name in group.targets
        }
        total = sum(source.num_bytes for source in self.sources)
        return {"metadata": {"total_size": total}, "weight_map": names}


def plan_buckets(
    sources: Iterable[Source], convert: Convert, limit: int, *, adapter: bool = False
) -> BucketPlan:
    """The plan for tensors, each of which is in one bucket.

    Args:
        sources: the tensors, on every rank the same.
        convert: names and layouts of a model folder; it is given tensors without memory.
        limit: bytes of a bucket; a group that is larger has one for itself.
        adapter: they are a LoRA adapter, which is one file.
    """
    groups = sorted(_groups(list(sources), convert), key=_home)  # stable: in order on each rank
    buckets = [groups] if adapter else list(_filled(groups, limit))
    ranks = sorted({p.rank for g in groups for s in g.sources for p in s.parts})
    owners = [bucket[0].home for bucket in buckets]
    return BucketPlan(
        buckets=tuple(
            Bucket(
                file=ADAPTER_WEIGHTS if adapter else _file_name(number, len(buckets)),
                owner=ranks[number % len(ranks)] if owner is None else owner,
                groups=tuple(each),
            )
            for number, (each, owner) in enumerate(zip(buckets, owners, strict=True))
        )
    )


def bucket_limit(sources: Iterable[Source]) -> int:
    """Bytes of a file, but for a larger tensor: each rank holds few files at a time.

    At most a 16th of all, so that work overlaps, if that is 16 MiB.
    """
    total = sum(source.num_bytes for source in sources)
    return min(_MAX_BYTES, max(_LEAST_BYTES, -(-total // _LEAST_BUCKETS)))


def source_of(name: str, tensor: torch.Tensor, dtype: torch.dtype, ranks: Sequence[int]) -> Source:
    """A tensor that lies on ranks as `torch.chunk` cuts its rows.

    Args:
        name: among the model's modules.
        tensor: one of its shape and type.
        dtype: in which floating-point numbers are published.
        ranks: that have its parts, in order.
    """
    rows = tensor.shape[0] if len(ranks) > 1 else 1
    size, each = tensor.numel(), -(-rows // len(ranks))
    ends = [min(each * number, rows) * (size // max(rows, 1)) for number in range(len(ranks) + 1)]
    return Source(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype if tensor.is_floating_point() else tensor.dtype,
        parts=tuple(Part(rank, *span) for rank, span in zip(ranks, pairwise(ends), strict=True)),
    )


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> list[Source]:
    """Tensors that rank 0 has."""
    return [source_of(name, tensor, tensor.dtype, (0,)) for name, tensor in tensors.items()]


def _home(group: Group) -> int:
    return -1 if group.home is None else group.home


def _filled(groups: Sequence[Group], limit: int) -> Iterator[list[Group]]:
    """Groups of one home, in buckets."""
    bucket: list[Group] = []
    size = 0
    for group in groups:
        is_full = size + group.num_bytes > limit
        if bucket and (is_full or group.home != bucket[0].home):
            yield bucket
            bucket, size = [], 0
        bucket.append(group)
        size += group.num_bytes
    yield bucket


def _file_name(number: int, total: int) -> str:
    return _ONLY if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


class _Traced(torch.Tensor):
    """A tensor that knows the sources it is computed from."""

    source_names: frozenset[str]
    """Not `names`, which tensors had for their dimensions until torch 2.12."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        names = frozenset[str]().union(*map(_names, (*args, *(kwargs or {}).values())))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, _Traced):
                each.source_names = names | _names(each)
        return result


def _names(value: Any) -> frozenset[str]:
    if isinstance(value, _Traced):
        return getattr(value, "source_names", frozenset())
    if isinstance(value, tuple | list):
        return frozenset[str]().union(*map(_names, value))
    return frozenset()


def _groups(sources: Sequence[Source], convert: Convert) -> list[Group]:
    """Sources in the order of what they become; those that a target is made of, together."""
    traced: dict[str, torch.Tensor] = {}
    for source in sources:
        tensor = source.meta.as_subclass(_Traced)
        tensor.source_names = frozenset({source.name})
        traced[source.name] = tensor
    by_name = {source.name: source for source in sources}
    converted = convert(traced)
    # What is computed in a way that leaves no trace may come from any of them.
    linked = _linked({n: _names(tensor) or frozenset(by_name) for n, tensor in converted.items()})
    return [
        Group(sources=tuple(by_name[n] for n in sorted(names)), targets=tuple(targets))
        for names, targets in linked
    ]


def _linked(origins: Mapping[str, frozenset[str]]) -> list[tuple[set[str], list[str]]]:
    """Names and targets of each group: targets that have a name in common are in one."""
    groups: dict[str, tuple[set[str], list[str]]] = {}  # by each name
    for target, names in origins.items():
        joined: tuple[set[str], list[str]] = (set(names), [target])
        before = {id(groups[name]): groups[name] for name in names if name in groups}
        for others, targets in before.values():
            joined = (joined[0] | others, targets + joined[1])
        groups.update(dict.fromkeys(joined[0], joined))
    return list({id(group): group for group in groups.values()}.values())
