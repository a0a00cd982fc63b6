"""A plan as values of the Helm chart, whose node pools carry it out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from services.chassis.errors import ConfigError, UsageError

_POOLS = {("rollout",): "rollout", ("rollout", "train"): "train", ("train",): "train"}
"""Tags -> the chart's pool of such nodes."""


def write_values(path: Path, num_nodes: Mapping[tuple[str, ...], int]) -> None:
    """Write the replicas and tags of the chart's pools, for `helm upgrade -f`.

    Args:
        path: of the file; JSON, which is YAML too.
        num_nodes: planned nodes by tags.

    Raises:
        UsageError: the chart has no pool for such nodes, or the same one for two kinds.
        ConfigError: the file cannot be written.
    """
    pools: dict[str, object] = {}
    for tags, number in num_nodes.items():
        pool = _POOLS.get(tuple(sorted(tags)))
        if pool is None or pool in pools:
            raise UsageError(
                f"--values: the chart has no pool of its own for {number} nodes with the tags "
                f"{list(tags)}: start them by hand, or plan with rollout and train alone"
            )
        pools[pool] = {"enabled": True, "replicas": number, "tags": sorted(tags)}
    unused = {name: {"enabled": False} for name in {*_POOLS.values()} - pools.keys()}
    try:
        path.write_text(json.dumps({"nodePools": pools | unused}, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--values {path}: {error.strerror}") from error
