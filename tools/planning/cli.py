"""`seamflow planning`: plans for operators, from measured costs."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from scheduler.model.stage_profile import StageProfile
from scheduler.policy.node_split import Split, split_datacentres, split_nodes
from services.chassis.errors import ExitCode, StartupError, UsageError
from services.node_agent.known_devices import device
from tools.planning.chart_values import write_values
from tools.planning.fusion import fusion_table, picture, reroute_table
from tools.planning.input_files import (
    read_dataflow,
    read_pipelines,
    read_profiles,
)
from tools.planning.role_placement import place
from tools.planning.tables import BEST, Prices, placement_table, span_table, split_table
from trainer.pipeline.fused_schedule.plan import fused_plan
from trainer.pipeline.fused_schedule.problem import Pipeline, Problem, fused_problem

if TYPE_CHECKING:
    from rich.table import Table

_DESCRIPTION = """\
Plan the activities of nodes.

--profile: split nodes between generation and training so that an iteration is shortest (StreamRL,
Alg. 1). The file holds the seconds of one iteration's stage by the number of nodes that do it:

  [generation]
  8 = 310.0
  16 = 165.0
  64 = 52.0

  [training]
  8 = 190.0
  64 = 31.0

Counts in between are interpolated in 1 / nodes. Fewer nodes than measured cannot do a stage, and
more are not faster, so measure up to the number you have. Give nodes of one datacentre with
--nodes; for separate datacentres, give --generation-nodes and --training-nodes. With
--generation-kind and --training-kind, kinds of devices such as h20-96 and h800-80, the plan says
what an iteration costs in dollars, by their prices an hour; --devices is their number in a node.

--roles: find which tags each node should carry (ReaL, RLHFuse). The file has a table for each tag:

  [rollout]
  seconds = { 4 = 620.0, 64 = 52.0 }
  elastic = true                  # continues while some of its nodes do another role
  switch_seconds = 6.0            # from another role to this one
  active_bytes = 60_000_000_000   # device memory of a node while it does this role
  parked_bytes = 0                # device memory while it does another role

  [reward]
  seconds = { 1 = 80.0, 8 = 10.0 }
  streams_from = ["rollout"]      # processes samples as they arrive
  shares_nodes = false            # needs dedicated nodes

  [train]
  seconds = { 8 = 190.0, 64 = 31.0 }
  after = ["reward"]              # starts when it has ended; omitted: may be an iteration behind

--fuse: find whether training actor and critic in one fused pipeline pays (RLHFuse), and at how many
micro-batches it stops to. A number of seconds is that of each stage; give a list if they differ:

  [actor]
  stages = 8                        # one on each node
  micro_batches = 32
  forward_seconds = 0.05            # of a micro-batch on a stage
  backward_seconds = 0.10
  activation_bytes = 1_950_000_000  # that a micro-batch holds on a stage until its backward

  [critic]                          # replicas side by side, in the opposite direction
  stages = 4
  micro_batches = 16                # of a replica
  forward_seconds = 0.04
  backward_seconds = 0.08
  activation_bytes = 2_000_000_000

--values FILE writes the plan of --profile or --roles as node pools of the Helm chart, for
`helm upgrade -f FILE`.

--device-bytes limits the activations. With --replicas and without [critic]: what it costs to send
the micro-batches of a failed stage through its peers (ReCycle).
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; exit with an error code and a message for wrong arguments or files."""
    parser = _parser()
    try:
        given = parser.parse_args(argv)
        _print(_plan(given))
    except ModuleNotFoundError as error:
        cure = f"this command needs {error.name}: pip install 'seamflow[scheduler]'"
        parser.exit(ExitCode.UNAVAILABLE, f"{parser.prog}: {cure}\n")
    except StartupError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="seamflow planning",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--profile", type=Path, help="split: seconds of both stages")
    files.add_argument("--roles", type=Path, help="placement: costs and order of the roles")
    files.add_argument("--fuse", type=Path, help="fused pipeline: stages, seconds and bytes")
    parser.add_argument("--nodes", type=int, help="nodes of one datacentre")
    parser.add_argument(
        "--generation-nodes", type=int, help="split: nodes of the one that generates"
    )
    parser.add_argument("--training-nodes", type=int, help="split: nodes of the one that trains")
    parser.add_argument("--generation-kind", help="split: kind of devices that generate")
    parser.add_argument("--training-kind", help="split: kind of devices that train")
    parser.add_argument("--devices", type=int, default=1, help="split: devices of a node")
    parser.add_argument(
        "--device-bytes", type=int, help="placement, fused pipeline: device memory of a node"
    )
    parser.add_argument("--values", type=Path, help="split, placement: writes the chart's pools")
    parser.add_argument("--replicas", type=int, help="fused pipeline: of the actor alone")
    parser.add_argument("--cpu-seconds", type=float, default=10.0, help="fused pipeline: of search")
    parser.add_argument("--seed", type=int, default=0, help="fused pipeline: of the search")
    return parser


def _plan(given: argparse.Namespace) -> list[Table | str]:
    if given.replicas is not None and given.fuse is None:
        raise UsageError("--replicas goes with --fuse")
    if given.values is not None and given.fuse is not None:
        raise UsageError("--values goes with --profile or --roles")
    if given.fuse:
        return _fused(given)
    return [*(_placed(given) if given.roles else _split(given))]


def _fused(given: argparse.Namespace) -> list[Table | str]:
    if (given.nodes, given.generation_nodes, given.training_nodes) != (None, None, None):
        raise UsageError("--fuse takes --device-bytes, --replicas, --cpu-seconds and --seed")
    actor, critic = read_pipelines(given.fuse)
    try:
        if critic is None and given.replicas is not None:
            return [reroute_table(actor, given.replicas, given.cpu_seconds, given.seed)]
        problem = _problem(given, actor, critic)
    except ValueError as error:
        raise UsageError(f"{given.fuse}: {error}") from error
    plan = fused_plan(problem, given.cpu_seconds, given.seed)
    return [fusion_table(problem, plan), picture(problem, plan.orders)]


def _problem(given: argparse.Namespace, actor: Pipeline, critic: Pipeline | None) -> Problem:
    if given.replicas is not None:
        raise UsageError("--replicas is for an [actor] without [critic]")
    capacity = math.inf if given.device_bytes is None else given.device_bytes
    if critic is None:
        return Problem(pipelines=(actor,), capacity=capacity)
    return fused_problem(actor, critic, actor.num_stages // critic.num_stages, capacity)


def _split(given: argparse.Namespace) -> list[Table]:
    pair = (given.generation_nodes, given.training_nodes)
    one = given.nodes is not None and pair == (None, None)
    two = given.nodes is None and None not in pair
    if not (one or two) or given.device_bytes is not None:
        raise UsageError("--profile takes --nodes, or --generation-nodes and --training-nodes")
    generation, training = read_profiles(given.profile)
    prices = _prices(given)
    try:
        best, table = (
            _one_datacentre(generation, training, given.nodes, prices)
            if one
            else _two_datacentres(generation, training, *pair, prices)
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if given.values is not None:
        stages = [("rollout", best.generation_nodes), ("train", best.training_nodes)]
        write_values(given.values, {(tag,): number for tag, number in stages})
    return [table]


def _placed(given: argparse.Namespace) -> list[Table]:
    pair = (given.generation_nodes, given.training_nodes)
    if None in (given.nodes, given.device_bytes) or pair != (None, None):
        raise UsageError("--roles takes --nodes and --device-bytes")
    dataflow = read_dataflow(given.roles)
    try:
        placement = place(dataflow, given.nodes, given.device_bytes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if given.values is not None:
        write_values(given.values, Counter(tags for tags in placement.tags if tags))
    return [placement_table(placement), span_table(placement)]


def _prices(given: argparse.Namespace) -> Prices | None:
    """Dollars an hour of a node that generates, and of one that trains; None: no kinds."""
    kinds = (given.generation_kind, given.training_kind)
    if kinds == (None, None):
        return None
    if None in kinds:
        raise UsageError("--generation-kind and --training-kind go together: give both")
    if given.devices < 1:
        raise UsageError(f"--devices is {given.devices}: give at least 1")
    try:
        generating, training = (given.devices * device(kind).price for kind in kinds)
    except ValueError as error:
        raise UsageError(f"--generation-kind and --training-kind: {error}") from error
    return generating, training


def _one_datacentre(
    generation: StageProfile, training: StageProfile, nodes: int, prices: Prices | None
) -> tuple[Split, Table]:
    """The best split; a table of it and of those that give generation one to seven eighths."""
    best = split_nodes(generation.seconds, training.seconds, nodes)
    shares = {nodes * eighths // 8 for eighths in range(1, 8)} - {0}
    even = _at(generation, training, nodes // 2, nodes - nodes // 2)
    splits = {best, *(_at(generation, training, share, nodes - share) for share in shares)}
    possible = [split for split in splits if math.isfinite(split.seconds)]
    names = {even: "even", best: BEST}
    return best, split_table(f"{nodes} nodes", sorted(possible, key=_nodes), names, prices)


def _two_datacentres(
    generation: StageProfile,
    training: StageProfile,
    generation_nodes: int,
    training_nodes: int,
    prices: Prices | None,
) -> tuple[Split, Table]:
    best = split_datacentres(generation.seconds, training.seconds, generation_nodes, training_nodes)
    whole = _at(generation, training, generation_nodes, training_nodes)
    title = f"{generation_nodes} nodes that generate, {training_nodes} that train"
    names = {whole: "all", best: BEST}
    return best, split_table(title, sorted({best, whole}, key=_nodes), names, prices)


def _at(generation: StageProfile, training: StageProfile, x: int, y: int) -> Split:
    return Split(
        generation_nodes=x,
        training_nodes=y,
        generation_seconds=generation.seconds(x),
        training_seconds=training.seconds(y),
    )


def _nodes(split: Split) -> tuple[int, int]:
    return split.generation_nodes, split.training_nodes


def _print(parts: Sequence[Table | str]) -> None:
    from rich.console import Console

    Console().print(*parts, sep="\n", highlight=False)
