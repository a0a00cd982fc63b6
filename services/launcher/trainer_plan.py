"""The trainer's processes: one, ranks under torchrun, or ranks on several nodes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

from services.launcher.checks.run_settings import process_setting
from services.launcher.child_process import ProcessPlan, process, settings_of, with_gpus
from services.launcher.config import REFERENCE_COLUMN, LauncherConfig
from services.launcher.layout import Layout
from services.launcher.node_plan import NodePlan
from services.lib.evaluation import EvaluationConfig

_MOST_STEPS = 10
"""Between checkpoints, as the trainer does by default."""


def trainers(
    config: LauncherConfig, layout: Layout, evaluation: EvaluationConfig
) -> list[ProcessPlan]:
    """The trainer; of several nodes one of each, and their rendezvous."""
    every = _checkpoint_every(config, layout, evaluation)
    nodes = [node for node in config.node_plans() if "train" in node.tags]
    if len(nodes) == 1:
        return [_trainer("trainer", nodes[0], config, layout, **every)]
    rendezvous = _rendezvous(layout, nodes)
    return [rendezvous] + [
        _trainer(
            f"trainer-{node.node_id}",
            node,
            config,
            layout,
            gang__node_id=node.node_id,
            gang__nodes=config.trainer_nodes,
            **every,
        )
        for node in nodes
    ]


def _checkpoint_every(
    config: LauncherConfig, layout: Layout, evaluation: EvaluationConfig
) -> dict[str, object]:
    """Where nothing is given, each evaluated step has a checkpoint: the best one is kept."""
    steps = evaluation.every_steps
    if not steps or not evaluation.keep_best:
        return {}
    if process_setting(config, layout.config_file, "trainer.checkpoint.every") is not None:
        return {}
    divisors = [each for each in range(1, _MOST_STEPS + 1) if steps % each == 0]
    return {"checkpoint__every": divisors[-1]}


def _rendezvous(layout: Layout, nodes: Sequence[NodePlan]) -> ProcessPlan:
    host, port = layout.address("rendezvous").split(":")
    listen = ("--host", host) if any(node.host for node in nodes) else ()
    command = (sys.executable, "-m", "trainer.ranks.rendezvous", "--port", port, *listen)
    return ProcessPlan(name="rendezvous", command=command)


def _trainer(
    name: str, node: NodePlan, config: LauncherConfig, layout: Layout, **other: object
) -> ProcessPlan:
    reference = (
        {} if config.reference is None else {"algorithm__reference_column": REFERENCE_COLUMN}
    )
    environment = settings_of(
        "trainer",
        port=layout.ports["trainer"],
        run_id=layout.run_id,
        model=layout.path(config.model),
        trajectory_manager=layout.address("trajectory_manager"),
        weights=layout.address("weights"),
        scheduler=layout.address("scheduler"),
        checkpoint__folder=layout.folder / "checkpoints",
        tracking__metrics_file=layout.folder / "metrics.jsonl",
        tracking__samples_file=layout.folder / "samples.jsonl",
        seed=config.seed,
        # A restarted trainer continues; an older run's checkpoint is only here with --resume.
        resume="true",
        # The launcher ends the run, after the last evaluation.
        end_run="false",
        **({"device": "cuda"} if node.gpus else {}),
        **reference,
        **other,
    )
    # Each rank takes the GPU of its LOCAL_RANK among them.
    gpus = node.gpus[: config.ranks_per_node]
    trainer = replace(process(name, "trainer", layout, environment), host=node.host)
    trainer = with_gpus(trainer, gpus, config.node_plans())
    over_nodes = len(config.training_nodes) > 1
    if config.ranks_per_node == 1 and not over_nodes:
        return trainer
    ranks = f"--nproc-per-node={config.ranks_per_node}"
    nodes = _over_nodes(node, config, layout) if over_nodes else ("--standalone",)
    torchrun = (sys.executable, "-m", "torch.distributed.run", *nodes, ranks)
    rank = ending_with_torchrun(trainer.command)
    # Each round of the rendezvous gets a store of its own, without the keys of earlier rounds.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if over_nodes else {}
    return replace(
        trainer,
        command=(*torchrun, "--no-python", *rank),
        environment={**trainer.environment, **own_store},
    )


def ending_with_torchrun(command: tuple[str, ...]) -> tuple[str, ...]:
    """A rank is in a session of its own: without this it outlives a torchrun that is killed, and
    keeps port and device."""
    setpriv = shutil.which("setpriv")
    return command if setpriv is None else (setpriv, "--pdeathsig", "KILL", "--", *command)


def _over_nodes(node: NodePlan, config: LauncherConfig, layout: Layout) -> tuple[str, ...]:
    """torchrun's flags; it lets spares wait, and takes one in when a node is silent for 6 s."""
    return (
        f"--nnodes={config.trainer_nodes}:{config.trainer_nodes}",
        f"--rdzv-id={layout.run_id}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={layout.address('rendezvous')}",
        "--rdzv-conf=is_host=0,keep_alive_interval=2,join_timeout=86400",
        f"--local-addr={layout.hosts[node.host]}",
        "--max-restarts=3",
    )
