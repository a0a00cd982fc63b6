"""`python -m tests.suites.publish_kills`: 30 kills in mid-publish of four processes."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.lib.redis_server import RedisServer
from tests.suites.publish_kills.kill_rig import Rig

_KILLS = ("weights", "shared", "sender", "stream", "weights", "sender") * 5


async def _run(folder: Path, redis_url: str) -> tuple[int, list[str], list[str]]:
    rig = Rig(folder=folder, redis_url=redis_url)
    try:
        await rig.run(_KILLS, seed=0)
        loads = len(rig.loads("shared")) + len(rig.loads("stream"))
        return loads, rig.wrong(), await rig.control()
    finally:
        rig.close()


def main() -> None:
    """Run it; exits with 1 and what did not hold."""
    with tempfile.TemporaryDirectory() as name:
        redis = RedisServer(Path(name))
        redis.start()
        try:
            loads, wrong, control = asyncio.run(_run(Path(name), redis.url))
        finally:
            redis.stop()
    print(f"{len(_KILLS)} kills, {loads} versions loaded, {len(wrong)} of them wrong")
    print(f"control, a damaged byte and no verification: {control}")
    if wrong or not control:
        sys.exit("\n".join([*wrong, *([] if control else ["the control loaded nothing wrong"])]))


if __name__ == "__main__":
    main()
