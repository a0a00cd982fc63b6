"""`make bench-gateway`: what the HTTP gateway costs, next to gRPC and to other HTTP servers.

Rollout gateway, trajectory manager and Redis are real; the engine is the fake one, which samples at
once. Everything shares this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import uvloop
from rich.progress import Progress

from bench.baselines.environments import installed, interpreter
from bench.harness.processes import scratch
from bench.http_gateway import added_cost, open_streams, throughput
from bench.http_gateway.world import world
from bench.report import MIN_SAMPLES, Report

_PACKAGES = ("seamflow", "aiohttp", "grpcio", "protobuf", "pydantic", "redis", "uvloop")
_PEER_PACKAGES = ("fastapi", "uvicorn", "httptools", "uvloop", "pydantic", "grpcio")


def main() -> None:
    """Measure, and write bench/results/bench-gateway.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few calls, and no file")
    quick = parser.parse_args().quick
    python = interpreter(throughput.PEER)  # made now, and not within a measurement
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as run:
        figures, raw = run.run(_measured(quick))
    report = Report(
        bench="bench-gateway",
        figures=figures,
        raw=raw,
        packages=_PACKAGES,
        peers={throughput.PEER: installed(python, *_PEER_PACKAGES)},
    )
    if quick:
        report.show()
    else:
        report.publish()


async def _measured(quick: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
    rounds = 2 if quick else MIN_SAMPLES
    num_calls = 5 if quick else 50
    figures, raw = dict[str, float](), dict[str, list[float]]()
    with Progress() as progress, scratch() as folder:
        bar = progress.add_task("added cost", total=3)
        async with world(Path(folder), step_seconds=0, stream_interval=1) as at_once:
            figures |= await added_cost.measure(at_once, raw, rounds, num_calls)
            progress.update(bar, description="throughput", advance=1)
            figures |= await throughput.measure(at_once, raw, rounds, num_calls)
        progress.update(bar, description="open streams", advance=1)
        async with world(
            Path(folder), open_streams.STEP_SECONDS, open_streams.STREAM_INTERVAL
        ) as slow:
            number = 100 if quick else 1000
            figures |= await open_streams.measure(slow, raw, 1 if quick else 2, number)
        progress.update(bar, advance=1)
    return figures, raw


if __name__ == "__main__":
    main()
