"""Each file of examples/papers by the real launcher: its mechanism acts, and not without it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from seamflow.inspect.run_files import read_steps

from tests.lib.end_to_end.support import ROOT, child_environment

pytestmark = pytest.mark.timeout(300)
PAPERS = ROOT / "examples/papers"
_FLAGS = {
    "prepare": "tests.lib.end_to_end.quickstart_files",
    "tasks": "{run}/prepared/tasks.jsonl",
    "heldout-tasks": "",
    "console": "false",
    "name": "run",
}
_LOST = ("tokens_lost", "tokens_duplicated", "tokens_with_wrong_version")
Summary = Mapping[str, Any]


def _has(name: str) -> Callable[[Summary], bool]:
    """Whether the summary counts this."""
    return lambda summary: summary["mechanisms"].get(name, 0) > 0


def _takes_turns(summary: Summary) -> bool:
    return bool(summary["mechanisms"].get("switches_to_rollout", 0) > 1)


def _is_multiplexed(summary: Summary) -> bool:
    return bool(summary["node_lendings"] > 0 and summary["node_returns"] > 0)


def _is_stale(summary: Summary) -> bool:
    return bool(0 < summary["max_staleness_seen"] <= 2)


ACTS: Mapping[str, Callable[[Summary], bool]] = {
    "colocated": _takes_turns,
    "disaggregated": lambda summary: not _takes_turns(summary),
    "multiplexed": _is_multiplexed,
    "streamed": _has("steps_begun_early"),
    "tail_start": _has("steps_begun_early"),
    "skew_aware": _has("long_turns_kept_apart"),
    "elastic": _has("trainer_resizes"),
    "two_zones": _has("weight_bytes_relayed"),
    "scoring": _has("switches_to_score"),
    "inter_stage_fusion": _has("tails_computed"),
    "fused_pipeline": _has("tasks_interleaved"),
    "echo_asynchronous_push_pull": _is_stale,
    "echo_sequential_pull": lambda summary: not _is_stale(summary),
}
"""By example, how it is seen that its mechanism acts."""
LINES: Mapping[str, Set[str]] = {
    "colocated": {"launcher.nodes"},
    "disaggregated": set(),
    "multiplexed": {"launcher.nodes", "scheduler.lending"},
    "streamed": {"launcher.max_staleness", "trainer.batch.stream_groups"},
    "tail_start": {
        *("launcher.max_staleness", "launcher.nodes"),
        *("trainer.batch.start_at_tail", "scheduler.lending"),
    },
    "skew_aware": {
        *("launcher.nodes", "launcher.ranker"),
        *("rollout_gateway.dispatch", "ranker.train_every_turns"),
    },
    "elastic": {
        *("launcher.nodes", "launcher.trainer_nodes", "trainer.replicas"),
        "scheduler.allocation.max_train_nodes",
    },
    "two_zones": {"launcher.nodes", "rollout_server.weight_transports"},
    "scoring": {"launcher.nodes", "launcher.reference", "trainer.kl.loss"},
    "inter_stage_fusion": {
        *("launcher.max_staleness", "launcher.nodes", "launcher.reference"),
        *("trainer.kl.loss", "scoring.start_at_tail"),
    },
    "fused_pipeline": {
        *("launcher.trainer_ranks", "trainer.backend", "trainer.critic"),
        *("trainer.algorithm.name", "trainer.batch.micro_batch_tokens"),
    },
    "echo_asynchronous_push_pull": {"rollout_gateway.max_version_lag"},
    "echo_sequential_pull": {"launcher.max_staleness", "rollout_gateway.max_version_lag"},
}
"""In which an example differs from disaggregated.toml."""
_STEPS = {
    "tail_start": 6,
    "skew_aware": 8,
    "elastic": 8,
    "inter_stage_fusion": 5,
    "fused_pipeline": 2,
}
_FLAGS_OF = {"elastic": ("--set=scheduler.allocation.max_train_nodes=1",)}
"""A unit that is one too many leaves at once, whatever is measured."""
_WHOLE_BATCHES = ("tail_start", "skew_aware", "inter_stage_fusion")
"""They act on rates of nodes that generate, for which small batches are too short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A run without the lines of some mechanisms."""

    example: str
    flags: tuple[str, ...] = ()
    without: tuple[str, ...]
    """Examples whose mechanism does not act in it."""


CONTROLS = (
    Control(
        example="disaggregated",
        without=(
            *("colocated", "multiplexed", "skew_aware", "two_zones", "scoring"),
            *("inter_stage_fusion", "fused_pipeline", "echo_sequential_pull"),
        ),
    ),
    Control(
        example="disaggregated",
        flags=("--max-staleness=0",),
        without=("streamed", "echo_asynchronous_push_pull"),
    ),
    Control(example="colocated", without=("disaggregated",)),
    Control(
        example="tail_start",
        flags=("--set=trainer.batch.start_at_tail=false",),
        without=("tail_start",),
    ),
    Control(
        example="elastic",
        flags=("--set=scheduler.allocation.max_train_nodes=0",),
        without=("elastic",),
    ),
)


def trained(example: str, folder: Path, *flags: str) -> Summary:
    """The summary of a few steps by the example's settings, without warm start."""
    steps = _STEPS.get(example, 4)
    is_whole = example in _WHOLE_BATCHES
    sizes = ("--concurrency=16",) if is_whole else ("--group-size=2", "--groups-per-step=4")
    command = [sys.executable, "-m", "services.launcher", "--config", str(PAPERS / example)]
    command[-1] += ".toml"
    command += [f"--{name}={value}" for name, value in _FLAGS.items()]
    flags = (*sizes, *(flags or _FLAGS_OF.get(example, ())))
    command += [f"--runs-folder={folder}", f"--set=trainer.num_steps={steps}", *flags]
    found = subprocess.run(
        command, cwd=ROOT, env=child_environment({}), capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    summary: Summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["optimizer_steps"] == steps
    assert [summary[name] for name in _LOST] == [0, 0, 0]
    return summary


def settings_of(example: str) -> dict[str, Any]:
    """The example's settings by their dotted names, its own name aside."""
    tables = tomllib.loads((PAPERS / f"{example}.toml").read_text())
    found: dict[str, Any] = {}
    rest = [("", tables)]
    while rest:
        prefix, table = rest.pop()
        for name, value in table.items():
            if isinstance(value, dict):
                rest.append((f"{prefix}{name}.", value))
            else:
                found[prefix + name] = value
    found.pop("launcher.name")
    return found


def test_every_example_is_tried_and_differs_in_its_lines_alone() -> None:
    """From the disaggregated one, so that a run of that is a control for the others."""
    assert {each.stem for each in PAPERS.glob("*.toml")} == ACTS.keys() == LINES.keys()
    base = settings_of("disaggregated")
    for example, lines in LINES.items():
        own = settings_of(example)
        names = {name for name in base.keys() | own.keys() if base.get(name) != own.get(name)}
        assert names == lines, example
    assert {name for each in CONTROLS for name in each.without} == ACTS.keys()


@pytest.mark.parametrize("example", ACTS)
def test_the_mechanism_acts(example: str, tmp_path: Path) -> None:
    """And no token is lost."""
    summary = trained(example, tmp_path)
    assert ACTS[example](summary), summary["mechanisms"]


def test_a_critic_needs_no_groups_to_stream(tmp_path: Path) -> None:
    """With groups of one a step begins with its first sample."""
    flags = ("--group-size=1", "--groups-per-step=8", "--set=trainer.algorithm.name=ppo")
    assert ACTS["streamed"](trained("streamed", tmp_path, *flags))
    steps = read_steps(tmp_path / "run/metrics.jsonl")
    assert {(step["num_groups"], step["num_rollouts"]) for step in steps} == {(8, 8)}


@pytest.mark.parametrize("control", CONTROLS, ids=lambda each: "_".join(each.without)[:30])
def test_without_its_lines_it_does_not(control: Control, tmp_path: Path) -> None:
    """The controls."""
    summary = trained(control.example, tmp_path, *control.flags)
    assert [each for each in control.without if ACTS[each](summary)] == []
