"""`python -m trainer --config FILE`, or `torchrun --nproc-per-node N -m trainer --config FILE`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from seamflow.errors import StaleEpochError
from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc

from services.chassis import log
from services.chassis.config.load import load_or_exit
from services.chassis.errors import ConfigError, DependencyUnavailable
from services.chassis.rpc.clients import channel, weights_channel
from services.chassis.rpc.server import Service, run
from trainer.checkpoint.best_checkpoint import best_of
from trainer.checkpoint.resume import find_checkpoint
from trainer.clients.node_client import NodeClient
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.loop import Trainer
from trainer.model.load_model import import_model_code
from trainer.model.lora import adapter_settings
from trainer.object_path import ObjectPath
from trainer.publish.publisher import Publisher
from trainer.ranks.device_lease import DeviceLease
from trainer.ranks.lives import end_process, keep_rank
from trainer.ranks.rank_group import RankGroup
from trainer.servicer import TrainerServicer
from trainer.tracking.tracker import Alarms, Trackers

_TABLE = "trainer"
_EXIT_SECONDS = 15.0
"""Grace period of the other ranks after a signal, in addition to rank 0's drain_seconds."""


def main() -> None:
    """Run rank 0 with its service, or the worker loop of another rank."""
    if os.environ.get("RANK", "0") != "0":
        end_process(_run_worker())
    try:
        run(_TABLE, TrainerConfig, build)
    except SystemExit as exit_:
        end_process(int(exit_.code or 0))


@asynccontextmanager
async def build(config: TrainerConfig) -> AsyncIterator[Service]:
    """Rank 0: the ranks, the training loop and the TrainerService."""
    ranks, alarms = RankGroup(), Alarms()
    async with AsyncExitStack() as stack:
        trackers = Trackers(config)
        stack.push_async_callback(asyncio.to_thread, trackers.close)
        stack.push_async_callback(ranks.stop)
        try:
            _check_store(config)
            found = find_checkpoint(config, alarms)
            await _until_device_is_free(config)
            await ranks.start(config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        device = DeviceLease(ranks, config.gang.nodes, ranks.rank0.nodes)
        samples, nodes, publisher = await connect_services(config, stack, ranks.rank0.nodes)
        trainer = Trainer(config, ranks, device, samples, nodes, publisher, trackers, alarms)
        best = best_of(config.checkpoint.place)
        best.recover(found[1].step if found else 0)
        servicer = TrainerServicer(config, trainer, device, ranks, best)
        yield Service(
            servicers=[(trainer_grpc.add_TrainerServiceServicer_to_server, servicer)],
            background=[lambda: _train(trainer, config), samples.keep_leases],
            drain=trainer.drain,
        )


def _check_store(config: TrainerConfig) -> None:
    place = config.checkpoint.place
    if isinstance(place, ObjectPath):
        try:
            place.check()
        except OSError as error:
            raise DependencyUnavailable("storage", str(error)) from error


async def _until_device_is_free(config: TrainerConfig) -> None:
    """Wait before the models are loaded on a GPU that a rollout server may hold.

    The other ranks wait for the first one meanwhile, for 30 minutes at most.
    """
    if config.device == "cpu" or config.scheduler is None:
        return
    number = config.gang.nodes
    names = [config.gang.node_id] if number == 1 else []
    async with channel(config, config.scheduler) as scheduler:
        await NodeClient(scheduler, config.run_id, config.gang.id, number, names).until_free()


async def connect_services(
    config: TrainerConfig, stack: AsyncExitStack, rank_nodes: Sequence[str] = ()
) -> tuple[SampleClient, NodeClient, Publisher]:
    """Clients of the services that the loop calls; `stack` closes their channels.

    `rank_nodes` has the node of each rank.
    """
    samples = await stack.enter_async_context(channel(config, config.trajectory_manager))
    connections = config.publish.weight_connections
    weights = await stack.enter_async_context(weights_channel(config, config.weights, connections))
    nodes = (
        await stack.enter_async_context(channel(config, config.scheduler))
        if config.scheduler
        else None
    )
    publisher = Publisher(
        weights,
        config.run_id,
        config.model,
        config.upload_folder,
        find_folder=config.publish.find_folder,
        compress=config.publish.compress,
        uploads=connections,
        adapter=adapter_settings(config) if config.publish.content == "adapter" else None,
    )
    return (
        SampleClient(samples, config.run_id),
        NodeClient(nodes, config.run_id, config.gang.id, config.gang.nodes, rank_nodes),
        publisher,
    )


async def _train(trainer: Trainer, config: TrainerConfig) -> None:
    try:
        await trainer.run()
    except StaleEpochError as error:
        log.get_logger().error("replaced_by_newer_trainer", error=str(error))
        raise
    except OSError as error:
        # A full disk, or missing permissions: a traceback does not help.
        raise DependencyUnavailable("storage", str(error)) from error
    log.get_logger().info("finished", step=trainer.progress.step)
    if config.exit_when_finished:
        os.kill(os.getpid(), signal.SIGTERM)


def _run_worker() -> int:
    """Run a rank other than the first, with replicas in a process that may be replaced."""
    config = load_or_exit(TrainerConfig, _TABLE)
    log.configure(config, _TABLE)
    if config.replicas > 1:
        import_model_code(config.model)  # once for all lives
        return keep_rank(lambda life: _run_life(config, life))
    _run_life(config, 1)
    return 0


def _run_life(config: TrainerConfig, life: int) -> None:
    from trainer.model.context_ranks import check_ranks
    from trainer.ranks.command_channel import worker_loop
    from trainer.ranks.process_group import join
    from trainer.ranks.worker import Worker

    try:
        ranks = join(config, life)
        check_ranks(config.context_parallel, config.replicas, ranks.world_size)
        worker = Worker(config, ranks.store, waits=life > 1)
    except (ValueError, ConfigError) as error:
        print(f"{_TABLE}: {error}", file=sys.stderr)
        raise SystemExit(ConfigError.exit_code) from error
    worker_loop(ranks, worker, config.drain_seconds + _EXIT_SECONDS)
