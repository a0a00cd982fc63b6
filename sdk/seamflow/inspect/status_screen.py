"""Status screen of a run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from seamflow.durations import seconds_of
from seamflow.enum_names import enum_name
from seamflow.errors import DeadlineError, UnavailableError
from seamflow.inspect.diagnosis import activity, node_state, server_state
from seamflow.inspect.endpoints import SERVICES
from seamflow.inspect.findings import evaluation_lines
from seamflow.inspect.learning import not_learning
from seamflow.inspect.lives import Life, time_text
from seamflow.inspect.progress import seconds_left
from seamflow.inspect.snapshot import Snapshot
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

_MARGIN = 9

_WIDTH, _INDENT = 96, " " * 9
_KEPT_TOGETHER = "\N{NO-BREAK SPACE}"
_SHOWN_LIVES = 4
_BAD_AT_ZERO = ("grad_norm", "learning_rate", "num_samples")


def status_screen(snapshot: Snapshot) -> str:
    """Text of the screen, without a trailing newline."""
    lines = [_line("run", snapshot.run_id or "unknown"), *life_lines(snapshot.lives, snapshot.now)]
    lines += _samples(snapshot)
    lines += _trainer(snapshot)
    lines += _evaluator(snapshot)
    lines += _health(snapshot)
    lines += _weights(snapshot)
    lines += _gateway(snapshot)
    lines += _nodes(snapshot)
    lines += _servers(snapshot)
    return "\n".join(lines)


def status_lines(snapshot: Snapshot) -> Iterator[str]:
    """Lines of what has answered, in a few words: for a view that is redrawn every second."""
    if snapshot.readiness is not None:
        yield next(iter(_samples(snapshot)))
    if snapshot.trainer is not None:
        yield next(iter(_trainer(snapshot)))
    if snapshot.nodes:
        yield from _nodes(snapshot)
        yield from _servers(snapshot)


def ago(duration: float) -> str:
    """A duration as text: "8 s", "3 min", "2.5 h"."""
    if duration < 120:
        return f"{max(duration, 0):.0f} s"
    return f"{duration / 60:.0f} min" if duration < 7200 else f"{duration / 3600:.1f} h"


def life_lines(lives: Sequence[Life], now: float = 0.0) -> Iterator[str]:
    """A line for each of the newest lives: when it began, how long it lasted, and how it ended."""
    first = max(len(lives) - _SHOWN_LIVES, 0)
    for i, life in enumerate(lives[first:], first + 1):
        reason = f" ({life.reason})" if life.reason else ""
        lasted = ago(life.seconds(now))
        text = f"{i}: from {time_text(life.start)}, {lasted}, {life.state}{reason}"
        yield _line("lives" if i == first + 1 else "", text)


def _samples(snapshot: Snapshot) -> Iterator[str]:
    ready = snapshot.readiness
    if ready is None:
        yield _line("samples", _problem(snapshot, "trajectory_manager"))
        return
    yield _line(
        "samples",
        f"groups {ready.num_ready_groups} ready of {ready.groups_per_step} a step, "
        f"{ready.num_running_groups} running ({ready.num_running_rollouts} rollouts), "
        f"{ready.num_admissible_groups} admissible; {ready.num_queued_tasks} tasks queued",
    )
    yield _line(
        "",
        f"steps {ready.leased_step} leased, {ready.committed_step} committed with checkpoints; "
        "since the start "
        f"{ready.num_admitted_groups} groups admitted, {ready.num_discarded_groups} discarded, "
        f"{ready.num_replaced_samples} samples replaced",
    )
    yield _line(
        "",
        f"{ready.num_dead_letters} dead letters, {ready.num_incomplete_groups} groups "
        f"waiting for columns, {ready.num_replay_groups} kept for replay; "
        f"{ready.num_stored_tokens:,} tokens stored",
    )


def _trainer(snapshot: Snapshot) -> Iterator[str]:
    trainer = snapshot.trainer
    if trainer is None:
        yield _line("trainer", _problem(snapshot, "trainer"))
        return
    state = enum_name(trainer_pb.TrainerState, trainer.state).lower()
    yield _line(
        "trainer",
        f"{state}, step {trainer.step} of {trainer.num_steps}{_left(snapshot)}, "
        f"published v{trainer.weight_version}, checkpoint at step {trainer.checkpoint_step}, "
        f"ranks {trainer.world_size}{_places(trainer)}"
        f"{'; of the last step:' if trainer.metrics else ''}",
    )
    yield from metric_lines(dict(sorted(trainer.metrics.items())))


def _left(snapshot: Snapshot) -> str:
    """Time that training still needs; empty while nothing is known."""
    steps = snapshot.progress.steps if snapshot.progress is not None else ()
    num_steps = snapshot.trainer.num_steps if snapshot.trainer is not None else 0
    return left_text(seconds_left(steps, num_steps, snapshot.lives))


def left_text(seconds: float | None) -> str:
    """As a part of a sentence, such as ", about 3 min left"; empty: nothing is left or known."""
    return f", about {ago(seconds)} left" if seconds else ""


def _evaluator(snapshot: Snapshot) -> Iterator[str]:
    """Nothing where the run has none."""
    if "evaluator" in snapshot.problems:
        yield _line("evals", _problem(snapshot, "evaluator"))
    for i, text in enumerate(evaluation_lines(snapshot)):
        yield _line("" if i else "evals", text)


def _health(snapshot: Snapshot) -> Iterator[str]:
    """What speaks against learning; why-stuck has the cures."""
    found = [] if snapshot.progress is None else not_learning(snapshot.progress)
    for i, finding in enumerate(found):
        yield _line("" if i else "health", f"! {finding.sentence}")


def _places(trainer: trainer_pb.GetStatusResponse) -> str:
    return f" on {', '.join(dict.fromkeys(trainer.rank_nodes))}" if trainer.rank_nodes else ""


def _weights(snapshot: Snapshot) -> Iterator[str]:
    manifest = snapshot.manifest
    if manifest is not None:
        since = _since(snapshot, manifest.commit_time)
        yield _line("weights", f"v{manifest.weight_version} of step {manifest.step}, {since} ago")
    elif snapshot.weights_answer:
        yield _line("weights", "none committed yet: the model the run started from")
    else:
        yield _line("weights", _problem(snapshot, "weights"))


def _gateway(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.gateway_serves is None:
        yield _line("gateway", _problem(snapshot, "gateway"))
    else:
        yield _line("gateway", "serving" if snapshot.gateway_serves else "up, not serving")


def _nodes(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.nodes is None:
        yield _line("nodes", _problem(snapshot, "scheduler"))
        return
    rows: list[tuple[str, ...]] = [("node", "can", "does", "state", "epoch", "heartbeat")]
    rows += [_node(snapshot, node) for node in snapshot.nodes]
    yield from _table("nodes", rows)


def _node(snapshot: Snapshot, node: scheduler_pb.Node) -> tuple[str, ...]:
    epoch, reported = node.assignment.epoch, node.reported_epoch
    return (
        node.node_id,
        ",".join(node.capability_tags),
        activity(node),
        node_state(node) + (" (drained)" if node.draining else ""),
        str(epoch) if epoch == reported else f"{reported}→{epoch}",
        f"{_since(snapshot, node.heartbeat_time)} ago",
    )


def _servers(snapshot: Snapshot) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("server", "address", "state", "weights", "running", "queued", "tokens/s")
    ]
    for server in snapshot.servers:
        if server.info is None:
            rows.append((server.node_id, server.address, "does not answer", "", "", "", ""))
            continue
        info = server.info
        rows.append(
            (
                info.server_id,
                server.address,
                server_state(server).removeprefix("is "),
                f"v{info.weight_version}",
                f"{info.num_running}/{info.max_running}",
                str(info.num_queued),
                f"{info.tokens_per_second:.0f}",
            )
        )
    if snapshot.nodes is not None:
        yield from _table("servers", rows)


def _table(name: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if len(rows) == 1:
        yield _line(name, "none")
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield _line("" if i else name, "  ".join(cells).rstrip())


def _line(name: str, text: str) -> str:
    return f"{name:{_MARGIN}}{text}"


def _problem(snapshot: Snapshot, name: str) -> str:
    service, error = SERVICES[name], snapshot.problems.get(name)
    if not isinstance(error, UnavailableError | DeadlineError):
        return str(error)
    address = snapshot.addresses.get(name)
    return f"{address} does not answer; set by {service.flag} or {service.variable}"


def _since(snapshot: Snapshot, time: Timestamp) -> str:
    return ago(snapshot.now - seconds_of(time))


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Names and numbers, a few on each line; a `!` marks those that say that nothing is learned.

    >>> metric_lines({"loss": 0.125, "grad_norm": 0.0})
    ['         loss 0.125, grad_norm 0 !']
    """
    lines = textwrap.wrap(
        ", ".join(_shown(metrics)),
        _WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT_TOGETHER, " ") for line in lines]


def _shown(metrics: Mapping[str, float]) -> Iterator[str]:
    for name, value in metrics.items():
        bad = not math.isfinite(value) or (value == 0 and name in _BAD_AT_ZERO)
        yield _KEPT_TOGETHER.join((name, f"{value:.4g}", *(["!"] if bad else [])))
