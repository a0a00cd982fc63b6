"""Which ranks compute the tokens of a micro-batch together, and which models can be computed so.

Groups are of neighbouring ranks. FSDP shards over all ranks as without them: a rank's gradient is
that of its slice of the tokens, and the sum over all ranks is that of all micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from services.lib.transformer.context_group import ContextGroup


def context_group(size: int) -> ContextGroup | None:
    """This rank's group. Collective.

    After the loss of a rank the groups may not take all ranks: the last ones are in none.

    Returns:
        None: the rank computes its micro-batches alone.
    """
    if size == 1:
        return None
    firsts = range(0, dist.get_world_size() - size + 1, size)
    groups = [list(range(first, first + size)) for first in firsts]
    group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    if group is None:
        return None
    return ContextGroup(group=group, size=size, number=dist.get_rank(group))


def check_ranks(context_parallel: int, replicas: int, num_ranks: int) -> None:
    """Raise `ValueError` unless groups of ranks share those of each replica evenly."""
    if context_parallel > 1 and num_ranks % (context_parallel * replicas):
        raise ValueError(
            f"context_parallel is {context_parallel} and a replica has {num_ranks / replicas:g} of "
            f"{num_ranks} ranks: give a divisor of that, or another number of ranks"
        )


def check_heads(model: Any, context_parallel: int) -> None:
    """Raise `ValueError` unless the ranks of a group share the query heads evenly."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if context_parallel > 1 and heads is not None and heads % context_parallel:
        raise ValueError(
            f"context_parallel is {context_parallel} and {type(model).__name__} has {heads} "
            "attention heads, which its ranks share: give a divisor of their number"
        )


def check_packed(model: Any, context_parallel: int, *, packed: bool) -> None:
    """Raise `ValueError` if a model cannot be packed, and its rows are to be shared."""
    if context_parallel > 1 and not packed:
        raise ValueError(
            f"context_parallel is {context_parallel} and {type(model).__name__} cannot compute "
            "packed rows, whose tokens the ranks share: set it to 1, or take another model"
        )
