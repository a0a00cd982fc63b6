"""Loads weights into an SGLang server: from its disk, or by a broadcast."""

from __future__ import annotations

from rollout.server.engines.sglang.http_client import Connection
from rollout.server.engines.sglang.model_shapes import num_ranks
from rollout.server.engines.sglang.sglang_turn import Weights

__all__ = ["put_weights"]


async def put_weights(
    connection: Connection, weights: Weights, *, flush: bool, host: str | None
) -> None:
    """Load `weights`, from the server's own disk or by a broadcast from us at `host`.

    Raises `Refused` or `WeightsError`, after which its weights may be of neither version.
    """
    if host is None:
        await connection.update_weights(weights.folder, weights.label, flush=flush)
        return
    from rollout.server.engines.sglang import weight_broadcast  # brings torch along

    ranks = num_ranks(await connection.server_info())
    sender = weight_broadcast.SGLangBroadcast.of(connection.post, host, ranks)
    await sender.load(weights.folder, weights.label, flush=flush)
