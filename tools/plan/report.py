"""Memory, time and cost as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from services.node_agent.known_devices import Device
from tools.plan.cures import Cure
from tools.plan.engine_size import EngineSize
from tools.plan.run_shape import RunShape
from tools.plan.splits import Split
from tools.plan.step_seconds import StepSeconds
from tools.plan.training_count import TrainingCount

_GB = 1e9
STEPS = 1000
"""Of which a run's cost is said."""


def head_line(shape: RunShape, device: Device, size: EngineSize) -> str:
    """The run and what is assumed of its rollouts."""
    lengths = shape.lengths
    return (
        f"{size.parameters / _GB:.2f}B parameters, {shape.devices} x {device.name}; ranks: "
        f"{shape.ranks}, rollout servers: {shape.engines}; {shape.rollouts} rollouts a step of "
        f"{lengths.mean} tokens, {lengths.longest} at most, {lengths.prompt} of them prompt"
    )


def training_lines(count: TrainingCount, device: Device, cure: Cure) -> Iterator[str]:
    """Memory of a rank, whether it fits, and what makes it fit."""
    yield f"memory of a rank, GB, in a micro-batch of {count.tokens} tokens"
    yield from _bytes(count.by_part)
    fits = count.device_bytes <= device.usable_bytes
    yield _total(count.device_bytes, device, fits=fits)
    if count.host_bytes:
        yield _row("on the host", count.host_bytes)
    if not fits:
        largest = max(count.by_part, key=lambda part: count.by_part[part])
        yield f"  largest: {largest}"
        yield f"  {_cured(cure, device)}"


def engine_lines(shape: RunShape, size: EngineSize, device: Device) -> Iterator[str]:
    """Memory of a rollout server's device."""
    running, parallel = shape.rollout.max_running, shape.tensor_parallel
    weights = size.weight_bytes // parallel
    longest = size.kv_bytes * shape.lengths.longest // parallel
    total, room = weights + running * longest, (device.usable_bytes - weights) // longest
    yield f"memory of a rollout server's device, GB, with {running} rollouts of the longest"
    yield from _bytes({"weights": weights, "kv cache": running * longest})
    yield _total(total, device, fits=room >= running)
    if room < 1:
        yield "  cure: a larger --tp-size in rollout_server.sglang_flags, or a larger device"
    elif room < running:
        yield (
            f"  cure: rollout_server.max_running = {room}; with more, rollouts wait or begin again "
            "when many are long"
        )


def time_lines(seconds: StepSeconds) -> Iterator[str]:
    """Seconds of a step by part."""
    yield "seconds of a step"
    exchange = f", exchange of heads and tokens {seconds.exchange:.1f}" if seconds.exchange else ""
    parts = f"of it collectives {seconds.traffic:.1f}, hidden{exchange}"
    yield _second("training", seconds.training, parts)
    yield _second("generation", seconds.generation, f"of it the longest {seconds.tail:.1f}")
    yield _second("publish", seconds.publish)
    if seconds.switch:
        yield _second("switch", seconds.switch, "of a node, each way")
    yield _second("step", seconds.step, f"nodes are idle {seconds.idle:.0%} of the time")


def cost_lines(split: Split, device: Device) -> Iterator[str]:
    """What a run of a thousand steps takes.

    Args:
        split: of the run.
        device: of all nodes, or of those that only roll out.
    """
    hours, devices = STEPS * split.seconds.step / 3600, split.shape.devices
    yield (
        f"{STEPS} steps: {hours:,.0f} hours, {STEPS * split.dollars:,.0f} dollars at "
        f"{device.price:.2f} an hour for each of {devices} devices"
    )


def _cured(cure: Cure, device: Device) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in cure.settings.items())
    needs = f"{cure.count.device_bytes / _GB:.1f} GB"
    if cure.count.device_bytes <= device.usable_bytes:
        return f"cure: {settings}: then {needs}, fits"
    tried = f"{settings} leaves {needs}" if settings else "no setting needs less"
    return f"no setting makes it fit: {tried}; take a larger device, or shorter rollouts"


def _total(num_bytes: int, device: Device, *, fits: bool) -> str:
    verdict = "fits" if fits else "DOES NOT FIT"
    usable = f"{device.usable_bytes / _GB:.1f} of {device.memory_bytes / _GB:.1f} usable"
    return f"{_row('total', num_bytes)}  {verdict}: {usable}"


def _bytes(by_part: Mapping[str, int]) -> Iterator[str]:
    for part, num_bytes in by_part.items():
        yield _row(part, num_bytes)


def _row(name: str, num_bytes: int) -> str:
    return f"  {name:18}{num_bytes / _GB:9.2f}"


def _second(name: str, seconds: float, note: str = "") -> str:
    return f"  {name:18}{seconds:9.1f}" + (f"  {note}" if note else "")
