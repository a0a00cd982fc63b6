"""What the HTTP gateway adds to a call through the Python SDK, one call after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from bench.http_gateway.calls import Call, by_grpc, by_http
from bench.http_gateway.world import World, cpu_seconds
from bench.report import percentile, ratios

_SIDES: Mapping[str, Call] = {"grpc": by_grpc, "http": by_http}
_WARM_CALLS = 5
_WHOLE_CALLS = 4
"""For each streamed call."""

Samples = defaultdict[str, list[float]]


async def measure(
    world: World, raw: dict[str, list[float]], rounds: int, num_calls: int
) -> dict[str, float]:
    """Figures of whole and of streamed replies: CPU of the serving processes, and latencies.

    Each round has `num_calls` streamed calls by either side, and more of the others.
    """
    figures: dict[str, float] = {}
    for stream, number in ((False, _WHOLE_CALLS * num_calls), (True, num_calls)):
        samples = Samples(list)
        for side in _SIDES:
            await _round(world, Samples(list), side, stream, _WARM_CALLS)
        for _ in range(rounds):
            for side in _SIDES:
                await _round(world, samples, side, stream, number)
        kind = "streamed" if stream else "whole"
        found = _cpu(samples, rounds) | _latency(
            samples, "first_token" if stream else "reply", rounds
        )
        figures |= {f"{kind}.{name}": value for name, value in found.items()}
        raw |= {f"{kind}.{name}": values for name, values in samples.items()}
    return figures


async def _round(world: World, samples: Samples, side: str, stream: bool, num_calls: int) -> None:
    rollouts = await world.rollouts(num_calls)
    before = cpu_seconds(world.gateway), cpu_seconds(world.http_gateway)
    seconds = [await _SIDES[side](world, rollout, stream) for rollout in rollouts]
    cpu = 1e3 * (cpu_seconds(world.gateway) - before[0]) / num_calls
    if side == "http":
        added = 1e3 * (cpu_seconds(world.http_gateway) - before[1]) / num_calls
        samples["added_cpu_ms"].append(added)
        cpu += added
    samples[f"{side}.cpu_ms"].append(cpu)
    samples[f"{side}.ms"] += [1e3 * each for each in seconds]


def _cpu(samples: Samples, rounds: int) -> dict[str, float]:
    http, grpc = samples["http.cpu_ms"], samples["grpc.cpu_ms"]
    return {
        "added_cpu_ms": median(samples["added_cpu_ms"]),
        "http.cpu_ms": median(http),
        "grpc.cpu_ms": median(grpc),
        **ratios("cpu_http_vs_grpc", http, grpc, rounds),
    }


def _latency(samples: Samples, what: str, rounds: int) -> dict[str, float]:
    http, grpc = samples["http.ms"], samples["grpc.ms"]
    http_p99, grpc_p99 = percentile(http, 0.99), percentile(grpc, 0.99)
    of_rounds = _medians(http, rounds), _medians(grpc, rounds)
    return {
        f"added_{what}_p50_ms": median(http) - median(grpc),
        f"added_{what}_p99_ms": http_p99 - grpc_p99,
        f"http.{what}_p50_ms": median(http),
        f"http.{what}_p99_ms": http_p99,
        f"grpc.{what}_p50_ms": median(grpc),
        f"grpc.{what}_p99_ms": grpc_p99,
        **ratios(f"{what}_http_vs_grpc", *of_rounds, rounds),
    }


def _medians(samples: list[float], rounds: int) -> list[float]:
    """Of each round."""
    size = len(samples) // rounds
    return [median(samples[i : i + size]) for i in range(0, len(samples), size)]
