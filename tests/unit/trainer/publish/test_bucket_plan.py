"""Which tensors are in which file, on whatever ranks: decided by names and shapes alone."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.trainer.support import make_model
from trainer.model.load_model import checkpoint_tensors
from trainer.publish.bucket_plan import (
    BucketPlan,
    Source,
    bucket_limit,
    plan_buckets,
    source_of,
    whole_tensors,
)

MIB = 1 << 20
SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3), min_size=1, max_size=20)


def sources_of(shapes: list[list[int]], ranks: int) -> list[Source]:
    """Tensors of these shapes, cut over ranks where they have rows."""
    return [
        source_of(
            f"t{number}",
            torch.empty(shape, device="meta"),
            torch.bfloat16,
            range(ranks) if shape else (0,),
        )
        for number, shape in enumerate(shapes)
    ]


@given(shapes=SHAPES, ranks=st.integers(1, 5), limit=st.integers(1, 500))
def test_every_tensor_is_once_in_a_bucket_of_bounded_size(
    shapes: list[list[int]], ranks: int, limit: int
) -> None:
    """In order for each home; parts cover a tensor; the same plan comes out again."""
    sources = sources_of(shapes, ranks)
    plan = plan_buckets(sources, dict, limit)
    assert sorted(s.name for s in plan.sources) == sorted(s.name for s in sources)
    for bucket in plan.buckets:
        assert sum(g.num_bytes for g in bucket.groups) <= limit or len(bucket.groups) == 1
        homes = {group.home for group in bucket.groups}
        assert len(homes) == 1
        assert homes in ({None}, {bucket.owner})
        assert bucket.owner in plan.ranks
    for source in sources:
        ends = [0, *(part.end for part in source.parts)]
        assert [part.begin for part in source.parts] == ends[:-1]
        assert ends[-1] == prod(source.shape)
    assert plan == plan_buckets(sources, dict, limit)
    numbers = [int(s.name[1:]) for b in plan.buckets if b.groups[0].home is None for s in b.sources]
    assert numbers == sorted(numbers)


@given(rows=st.integers(1, 40), ranks=st.integers(1, 9))
def test_parts_are_cut_as_fsdp_cuts_rows(rows: int, ranks: int) -> None:
    """`torch.chunk`, and nothing for the ranks that are left over."""
    tensor = torch.arange(3 * rows).view(rows, 3)
    source = source_of("t", tensor, torch.float32, range(ranks))
    chunks = [chunk.flatten().tolist() for chunk in tensor.chunk(ranks)]
    found = [list(range(part.begin, part.end)) for part in source.parts]
    assert found == chunks + [[]] * (ranks - len(chunks))


@pytest.mark.parametrize(
    ("total", "expected"),
    [(MIB, 16 * MIB), (320 * MIB, 20 * MIB), (1 << 36, 512 * MIB)],
)
def test_smaller_models_have_smaller_buckets(total: int, expected: int) -> None:
    """A 16th of all, but at least 16 MiB and at most 512 MiB."""
    tensor = torch.empty(total, dtype=torch.uint8, device="meta")
    assert bucket_limit(whole_tensors({"t": tensor})) == expected


def linked(plan: BucketPlan) -> set[frozenset[str]]:
    """The groups of several tensors."""
    groups = [group for bucket in plan.buckets for group in bucket.groups]
    return {frozenset(s.name for s in g.sources) for g in groups if len(g.sources) > 1}


def test_tensors_of_one_target_are_a_group() -> None:
    """Also across a chain: a and b make x, b makes y, c and d make z, e stays what it is."""

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        t = tensors
        return {
            "x": torch.cat([t["a"], t["b"]]),
            "y": t["b"].T.contiguous(),
            "z": torch.stack([t["c"], t["d"]]),
            "e": t["e"],
        }

    tensors = {name: torch.ones(4, 2) for name in "abcde"}
    plan = plan_buckets(whole_tensors(tensors), convert, 1)
    assert linked(plan) == {frozenset("ab"), frozenset("cd")}
    assert plan.index is not None
    assert list(plan.index["weight_map"]) == ["x", "y", "z", "e"]


def test_what_leaves_no_trace_is_converted_with_all() -> None:
    """Rather than with too little."""

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"new": torch.empty(4, device="meta")}

    plan = plan_buckets(whole_tensors({n: torch.ones(2) for n in "ab"}), convert, 1)
    assert linked(plan) == {frozenset("ab")}


def test_groups_of_a_mixture_of_experts_give_what_the_whole_gives(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    """Names, and contents bit for bit."""
    from transformers import AutoModelForCausalLM

    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    folder = make_model(tmp_path_factory.mktemp("model"), kind="qwen3_moe", **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    whole = checkpoint_tensors(model, tensors)
    plan = plan_buckets(whole_tensors(tensors), lambda given: checkpoint_tensors(model, given), 999)
    found: dict[str, torch.Tensor] = {}
    for bucket in plan.buckets:
        for group in bucket.groups:
            made = checkpoint_tensors(model, {s.name: tensors[s.name] for s in group.sources})
            assert set(made) == set(group.targets)
            found |= made
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert len(whole) > len(tensors)
