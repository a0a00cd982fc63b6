"""Seconds of a step by rooflines: work over what a device attains of its peaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.policy.node_split import StageProfile
from scheduler.policy.placement import attained_flops
from services.node_agent.known_devices import Device
from tools.plan.engine_size import EngineSize
from tools.plan.run_shape import RunShape
from tools.plan.training_count import TrainingCount
from trainer.model.load_model import DTYPES, master_type
from trainer.model.load_sharded import mixed_precision

SHARE_FLOPS = 0.4
"""Share of peak FLOP/s that training and prefill attain."""
SHARE_BANDWIDTH = 0.6
"""Share of a device's bandwidth that decoding attains."""
SHARE_LINK = 0.7
"""Share of a link's bandwidth that collectives and copies attain."""
_OPTIMIZER_READS = 2
"""Times that an update passes over weights, gradients and optimizer state: read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """One optimizer step of a run that goes on."""

    training: float
    """Forward and backward passes, and the update."""
    traffic: float
    """Of FSDP's collectives, within `training`, which hides them as far as it is longer."""
    offload: float
    """Of cpu_offload's copies over PCIe, there and back, hidden likewise."""
    update: float
    """Of the optimizer, within `training`; passes wait for it."""
    exchange: float
    """Of heads and tokens in context groups, within `training`; passes wait for it."""
    generation: float
    """Of a step's rollouts on all rollout servers."""
    tail: float
    """Within `generation`: the longest rollouts, when all others have ended."""
    publish: float
    """From the trainer to the rollout servers."""
    switch: float
    """Of a node from one activity to another; 0: no node has both."""
    step: float
    """From one update to the next."""
    idle: float
    """Share of all node-seconds in which a node does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured seconds of a step's stages, in place of those by rooflines."""

    generation: StageProfile
    training: StageProfile


def step_seconds(
    shape: RunShape,
    count: TrainingCount,
    size: EngineSize,
    device: Device,
    *,
    train_device: Device | None = None,
    measured: Measured | None = None,
) -> StepSeconds:
    """Estimate a step.

    Args:
        shape: of the run.
        count: of a micro-batch of rollouts of mean length.
        size: of the model in an engine.
        device: of all nodes.
        train_device: of the nodes that train; None: the same.
        measured: seconds by number of nodes; infinite on fewer nodes than were measured.
    """
    trains = train_device or device
    traffic, exchange = _traffic(shape, count, trains), _exchange(shape, count, trains)
    offload, update = _offload(shape, count, trains), _update(count, shape, trains)
    passes = max(_compute(shape, count, trains) + exchange, traffic, offload)
    training = passes + update
    if measured is not None:
        training = measured.training.seconds(shape.trainer_nodes)
        traffic = exchange = offload = update = 0.0

    def generation(nodes: int) -> tuple[float, float]:
        if measured is not None:
            return measured.generation.seconds(nodes), 0.0
        return _generation(shape, size, device, nodes * shape.servers_per_node)

    whole, tail = generation(shape.rollout_nodes)
    publish = size.weight_bytes / (SHARE_LINK * device.network)
    switch = _switch(shape, count, size, device)
    step = _step(shape, lambda nodes: generation(nodes)[0], training + publish, switch)
    busy = shape.trainer_nodes * training + shape.rollout_nodes * (whole - tail)
    return StepSeconds(
        training=training,
        traffic=traffic,
        offload=offload,
        update=update,
        exchange=exchange,
        generation=whole,
        tail=tail,
        publish=publish,
        switch=switch,
        step=step,
        idle=max(0.0, 1 - busy / (len(shape.nodes) * step)),
    )


def _tokens(shape: RunShape) -> float:
    """That a rank, or the ranks of a context group together, compute in a step."""
    epochs = shape.trainer.algorithm.num_epochs
    groups = shape.ranks / shape.trainer.context_parallel
    return epochs * shape.rollouts * shape.lengths.mean / groups


def _compute(shape: RunShape, count: TrainingCount, device: Device) -> float:
    flops = count.flops / count.tokens * _tokens(shape)
    return flops / (SHARE_FLOPS * device.peak(shape.trainer.dtype))


def _traffic(shape: RunShape, count: TrainingCount, device: Device) -> float:
    """Weights are gathered twice for each micro-batch, gradients added up once."""
    parts = shape.ranks // shape.trainer.replicas
    precision, own = mixed_precision(shape.trainer.dtype), DTYPES[shape.trainer.dtype]
    weight = (precision.param_dtype or own).itemsize
    gradient = (precision.reduce_dtype or own).itemsize
    whole = 2 * weight * count.parameters + gradient * count.trained
    passes = math.ceil(_tokens(shape) / count.tokens)
    link = device.link if shape.trainer_nodes == 1 else device.network
    return passes * whole * (parts - 1) / parts / (SHARE_LINK * link)


def _offload(shape: RunShape, count: TrainingCount, device: Device) -> float:
    """A rank's part comes to the device twice for each micro-batch, its gradients go back once."""
    if not shape.trainer.cpu_offload:
        return 0.0
    own = master_type(shape.trainer).itemsize * (2 * count.parameters + count.trained)
    copies = math.ceil(_tokens(shape) / count.tokens)
    return copies * own / (shape.ranks // shape.trainer.replicas) / (SHARE_LINK * device.host_link)


def _exchange(shape: RunShape, count: TrainingCount, device: Device) -> float:
    """Neighbouring ranks are a context group: it lies on one node where they fit."""
    is_on_node = (
        shape.trainer_nodes == 1 or shape.ranks_per_node % shape.trainer.context_parallel == 0
    )
    link = device.link if is_on_node else device.network
    return _tokens(shape) / count.tokens * count.exchanged_bytes / (SHARE_LINK * link)


def _update(count: TrainingCount, shape: RunShape, device: Device) -> float:
    """AdamW passes over its state: with cpu_offload on the CPU, in host memory.

    A machine's host memory is taken to be as fast as the PCIe links of all its devices together.
    """
    state = 16 * count.trained / (shape.ranks // shape.trainer.replicas)
    memory = device.host_link if shape.trainer.cpu_offload else device.bandwidth
    return _OPTIMIZER_READS * state / (SHARE_BANDWIDTH * memory)


def _generation(
    shape: RunShape, size: EngineSize, device: Device, engines: int
) -> tuple[float, float]:
    """Seconds of a step's rollouts on some engines, and of the tail within them."""
    lengths = shape.lengths
    own = math.ceil(shape.rollouts / engines)
    running = min(own, shape.rollout.max_running, _room(shape, size, device))
    sampled, waves = lengths.mean - lengths.prompt, own / running
    context = (lengths.mean + lengths.prompt) / 2
    decoding = waves * sampled * _decode_step(shape, size, device, running, context)
    flops = 2 * size.active_parameters * own * lengths.prompt
    prefill = flops / (SHARE_FLOPS * device.flops * shape.tensor_parallel)
    left = lengths.longest - lengths.mean
    tail = left * _decode_step(shape, size, device, 1, lengths.longest)
    # With staleness the next rollouts start while the last ones go on.
    tail = tail if shape.max_staleness == 0 else 0.0
    return prefill + decoding + tail, tail


def _room(shape: RunShape, size: EngineSize, device: Device) -> int:
    """Rollouts of mean length whose KV cache an engine's devices hold, at least one."""
    free = shape.tensor_parallel * device.usable_bytes - size.weight_bytes
    return max(1, int(free / (size.kv_bytes * shape.lengths.mean)))


def _decode_step(
    shape: RunShape, size: EngineSize, device: Device, running: int, context: float
) -> float:
    """Seconds of one token of each of `running` sequences of `context` tokens."""
    num_bytes = size.bytes_of_step(running) + running * size.kv_bytes * context
    flops = 2 * size.active_parameters * running
    bandwidth, peak = SHARE_BANDWIDTH * device.bandwidth, SHARE_FLOPS * device.flops
    attained = attained_flops(flops / num_bytes, bandwidth, peak)
    return flops / (attained * shape.tensor_parallel)


def _switch(shape: RunShape, count: TrainingCount, size: EngineSize, device: Device) -> float:
    """The trainer's state goes to the host and back, the engine's weights come back."""
    if not any({"rollout", "train"} <= set(tags) for tags in shape.nodes):
        return 0.0
    state = 12 * count.trained / (shape.ranks // shape.trainer.replicas)
    weights = size.weight_bytes / shape.tensor_parallel
    return (2 * state + weights) / 2 / (SHARE_LINK * device.host_link)


def _step(
    shape: RunShape, generation: Callable[[int], float], training: float, switch: float
) -> float:
    """Seconds from one update to the next.

    A node that does both takes `switch` seconds whenever it turns to the other. Without staleness
    training begins when generation has ended. With it the trainer begins at once, on rollouts of
    the step before: the other nodes generate meanwhile, and the trainer's nodes help them after.
    """
    shared = shape.shared_nodes
    alone, switch = shape.rollout_nodes - shared, switch if shared else 0.0
    trained = switch + training
    begin = switch if shape.max_staleness == 0 else trained + switch
    done = begin / generation(alone) if alone else 0.0
    if done >= 1 or not shared:
        generated = generation(alone) if alone else math.inf
    else:
        generated = begin + (1 - done) * generation(shape.rollout_nodes)
    return generated + trained if shape.max_staleness == 0 else max(generated, trained)
