"""`seamflow plan`: memory, time, nodes and cost of a run, before anything is rented."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from services.chassis.errors import ExitCode, StartupError, UsageError
from services.launcher.config import with_file
from services.node_agent import known_devices
from services.node_agent.known_devices import Device
from tools.plan.cures import Cure, find_cures
from tools.plan.engine_size import EngineSize, engine_size
from tools.plan.run_shape import RunShape, read_run
from tools.plan.splits import Split, Splits, read_profiles, split_lines, write_values
from tools.plan.step_seconds import SHARE_BANDWIDTH, StepSeconds
from tools.plan.training_count import TrainingCount, count_training
from trainer.algorithms.base import make_algorithm

_DESCRIPTION = """\
Say what a run needs of its devices, how long a step takes, and what it costs.

Memory is counted on the trainer's own code with tensors that have none, from the model's
config.json: no weights are needed. Seconds are work over what devices attain of their peaks, or
what --profile says was measured, by the number of nodes that do it:

  [generation]
  8 = 310.0
  64 = 52.0

  [training]
  8 = 190.0
  64 = 31.0

Counts in between are interpolated in 1 / nodes. Fewer nodes than measured cannot do a stage, and
more are not faster, so measure up to the number you have. --values writes the best split of the
nodes as node pools of the Helm chart, for `helm upgrade -f FILE`. Further arguments are those of
`seamflow train`, such as --set trainer.dtype=bfloat16.
"""

_GB = 1e9
OFF = (1.1, 2.0)
"""Least and most seconds of a published step over those forecast (docs/forecast.md)."""
STEPS = 1000
"""Of which a run's cost is said."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; exit with an error code and a message for wrong settings."""
    parser = _parser()
    warnings.filterwarnings("ignore")  # of torch, on tensors that have no memory
    try:
        given, run = parser.parse_known_args(with_file(sys.argv[1:] if argv is None else argv))
        if given.price is not None and given.price < 0:
            raise UsageError(f"--price is {given.price}: give dollars an hour, at least 0")
        device = given.device if given.price is None else replace(given.device, price=given.price)
        shape = read_run(
            ["--config", given.config, *run],
            longest=given.rollout_tokens,
            mean=given.mean_tokens,
            prompt=given.prompt_tokens,
        )
        if given.train_device and shape.shared_nodes:
            raise UsageError("--train-device: nodes of the run do both; give each one tag")
        for line in _plan(shape, device, given):
            print(line, flush=True)
    except StartupError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    except ValueError as error:  # the model cannot be made, or a setting does not fit it
        parser.exit(ExitCode.CONFIG, f"{parser.prog}: {error}\n")


def _plan(shape: RunShape, device: Device, given: argparse.Namespace) -> Iterator[str]:
    size, longest = engine_size(shape.trainer.model), shape.lengths.longest
    trains = given.train_device or device
    yield head_line(shape, device, size)
    count = _count(shape, longest)
    cure = find_cures(shape, count, trains.usable_bytes, partial(_count, tokens=longest))
    yield from training_lines(count, trains, cure)
    yield from host_lines(cure, given.host_memory)
    yield from engine_lines(shape, size, device)
    mean = shape.lengths.mean
    splits = Splits(
        shape=cure.shape,
        count=cure.count if mean == longest else _count(cure.shape, mean),
        state=cure.count,
        size=size,
        device=device,
        train_device=given.train_device,
        measured=read_profiles(given.profile) if given.profile else None,
    )
    if cure.settings:
        yield f"with {', '.join(f'{name} = {value}' for name, value in cure.settings.items())}:"
    configured = splits.of(cure.shape)
    if math.isfinite(configured.seconds.step):  # else fewer nodes than were measured
        yield from time_lines(configured.seconds)
        yield from cost_lines(configured, device)
    best = splits.best(given.split_nodes or len(shape.nodes))
    yield from split_lines(configured, best, STEPS)
    if given.values is not None:
        if not best:
            raise ValueError(f"--values {given.values}: no split of these nodes fits the device")
        fastest = min(best, key=lambda split: split.seconds.step)
        write_values(given.values, fastest.shape, cure.settings)


def _count(shape: RunShape, tokens: int) -> TrainingCount:
    return count_training(
        shape.trainer,
        ranks=shape.ranks,
        rollout_tokens=tokens,
        prompt_tokens=shape.lengths.prompt,
        critic=make_algorithm(shape.trainer).critic,
    )


def _device(name: str) -> Device:
    try:
        return known_devices.device(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="seamflow plan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="of the run; train.toml here is found")
    parser.add_argument(
        "--device",
        type=_device,
        required=True,
        help="of every node: a name such as h100-80, or its numbers, such as "
        "memory=24,tflops=165,bandwidth=1008,pcie=32 (GiB, TFLOP/s, GB/s, GB/s)",
    )
    parser.add_argument("--host-memory", type=float, help="GiB of a machine, for cpu_offload")
    parser.add_argument(
        "--train-device", type=_device, help="of the nodes that train, where it is another"
    )
    parser.add_argument("--price", type=float, help="dollars an hour for a --device")
    parser.add_argument("--rollout-tokens", type=_positive, help="of the longest rollouts")
    parser.add_argument("--mean-tokens", type=_positive, help="of a rollout on average")
    parser.add_argument("--prompt-tokens", type=_positive, help="of them that are not sampled")
    parser.add_argument(
        "--split-nodes", type=_positive, help="nodes to split (as many as the run has)"
    )
    parser.add_argument("--profile", type=Path, help="TOML: measured seconds of both stages")
    parser.add_argument("--values", type=Path, help="gets Helm values of the best split")
    return parser


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
    yield f"memory of a rank, GB, when most is held in a micro-batch of {count.tokens} tokens"
    yield from _bytes(count.by_part)
    fits = count.device_bytes <= device.usable_bytes
    yield _total(count.device_bytes, device, fits=fits)
    if not fits:
        largest = max(count.by_part, key=lambda part: count.by_part[part])
        yield f"  largest: {largest}"
        yield f"  {_cured(cure, device)}"


def host_lines(cure: Cure, memory: float | None) -> Iterator[str]:
    """What the ranks of a machine keep in host memory, next to its GiB where they are given."""
    if not cure.count.host_bytes:
        return
    ranks = cure.shape.ranks_per_node
    needed = ranks * cure.count.host_bytes
    verdict = "give --host-memory to compare"
    if memory is not None:
        fits = "fits" if needed <= memory * 2**30 else "DOES NOT FIT"
        verdict = f"{fits}: a machine has {memory * 2**30 / _GB:.1f}"
    yield f"host memory that {ranks} ranks of a machine keep, GB"
    yield f"{_row('on the host', needed)}  {verdict}"


def engine_lines(shape: RunShape, size: EngineSize, device: Device) -> Iterator[str]:
    """Memory of a rollout server's device: rollouts that do not fit wait."""
    running, parallel = shape.rollout.max_running, shape.tensor_parallel
    weights = size.weight_bytes // parallel
    longest = size.kv_bytes * shape.lengths.longest // parallel
    total, room = weights + running * longest, (device.usable_bytes - weights) // longest
    yield f"memory of a rollout server's device, GB, with {running} rollouts of the longest"
    yield from _bytes({"weights": weights, "kv cache": running * longest})
    yield _total(total, device, fits=room >= running, waits=room >= 1)
    if room < 1:
        yield "  cure: a larger --tp-size in rollout_server.sglang_flags, or a larger device"
    elif room < running:
        yield (
            f"  warning: {room} of the longest run at a time, the others wait, and an engine may "
            f"begin some again: rollout_server.max_running = {room} avoids that"
        )
    if shape.rollout.engine == "torch":
        yield (
            "  warning: the embedded engine decoded at 0.04 to 0.07 of an H200's bandwidth, and "
            f"{SHARE_BANDWIDTH} is assumed: generation takes far longer; sglang is for GPUs"
        )


def time_lines(seconds: StepSeconds) -> Iterator[str]:
    """Seconds of a step by part."""
    yield "seconds of a step"
    exchange = f", exchange of heads and tokens {seconds.exchange:.1f}" if seconds.exchange else ""
    offload = (
        f", over PCIe {seconds.offload:.1f}, on the CPU {seconds.update:.1f}"
        if seconds.offload
        else ""
    )
    parts = f"of it collectives {seconds.traffic:.1f}, hidden{exchange}{offload}"
    yield _second("training", seconds.training, parts)
    tail = f"of it {seconds.tail:.1f} when only the longest go on" if seconds.tail else ""
    yield _second("generation", seconds.generation, tail)
    yield _second("publish", seconds.publish)
    if seconds.switch:
        yield _second("switch", seconds.switch, "of a node, each way")
    yield _second("step", seconds.step, f"nodes are idle {seconds.idle:.0%} of the time")
    least, most = OFF
    yield (
        "  a lower bound, without agents, environments, checkpoints and evaluations: published "
        f"steps took {least} to {most} times as long as forecast"
    )


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


def _total(num_bytes: int, device: Device, *, fits: bool, waits: bool = False) -> str:
    verdict = "fits" if fits else "more than fits at a time" if waits else "DOES NOT FIT"
    usable = f"{device.usable_bytes / _GB:.1f} of {device.memory_bytes / _GB:.1f} usable"
    return f"{_row('total', num_bytes)}  {verdict}: {usable}"


def _bytes(by_part: Mapping[str, int]) -> Iterator[str]:
    for part, num_bytes in by_part.items():
        if num_bytes:
            yield _row(part, num_bytes)


def _row(name: str, num_bytes: int) -> str:
    return f"  {name:18}{num_bytes / _GB:9.2f}"


def _second(name: str, seconds: float, note: str = "") -> str:
    return f"  {name:18}{seconds:9.1f}" + (f"  {note}" if note else "")
