"""The command line and the limits that the chaos suites share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console
from rich.progress import Progress

from bench.harness import processes
from bench.report import RESULTS
from tests.chaos.store.rig import Setting

NOTHING_LOST = (
    "samples_committed_twice",
    "samples_skipped",
    "samples_moved",
    "steps_wrong",
    "tokens_lost",
    "tokens_duplicated",
    "tokens_with_wrong_version",
)
"""Figures of a run that must be 0: each sample trained once, each token stored once, unchanged."""

_QUICK = 10

Scenario = TypeVar("Scenario")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite(Generic[Scenario]):
    """The scenarios and settings of a command line."""

    chosen: Mapping[str, Scenario]
    """All scenarios by name, with their counts."""
    names: Sequence[str]
    """The scenarios to run."""
    seed: int
    """Seed of everything random."""
    complete: bool
    """True for a full run, whose report replaces the stored one."""
    keep: Path | None
    """Folder for logs and data; None: a temporary one."""

    @classmethod
    def from_arguments(
        cls, description: str | None, scenarios: Callable[[int], Mapping[str, Scenario]]
    ) -> Suite[Scenario]:
        """Parse `--seed`, `--quick`, `--only` and `--keep`; `scenarios` divides its counts."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--quick", action="store_true", help="a tenth of every count")
        parser.add_argument("--only", nargs="+", choices=list(scenarios(1)), metavar="SCENARIO")
        parser.add_argument("--keep", type=Path, help="new folder for logs and data, kept")
        given = parser.parse_args()
        chosen = scenarios(_QUICK if given.quick else 1)
        names = given.only or list(chosen)
        complete = names == list(chosen) and not given.quick
        return cls(chosen=chosen, names=names, seed=given.seed, complete=complete, keep=given.keep)

    @contextmanager
    def setting(self) -> Iterator[Setting]:
        """The setting of the scenarios, with a progress bar; its folder exists in the block."""
        console = Console(stderr=True)
        console.print(f"seed {self.seed}: {', '.join(self.names)}")
        with processes.scratch() as scratch, Progress(console=console) as progress:
            yield Setting(folder=self.keep or Path(scratch), seed=self.seed, progress=progress)

    def report_folder(self, setting: Setting) -> Path:
        """Where the report is written; ends the progress bar."""
        setting.progress.stop()
        return RESULTS if self.complete else setting.folder


def broken_limits(
    figures: Mapping[str, float], limits: Mapping[str, float], zero: Sequence[str]
) -> list[str]:
    """Names of the figures above their limit, or above 0, and of controls that did not fail."""
    failed = [name for name, limit in limits.items() if not figures.get(name, 0.0) <= limit]
    failed += [name for name in zero if figures.get(name, 0.0) > 0]
    if figures.get("negative_controls") != figures.get("negative_controls_failed"):
        failed.append("negative_controls_failed")
    return failed


def exit_if_broken(failed: Sequence[str]) -> None:
    """Exit with 1 and the names of the broken limits, if there are any."""
    if failed:
        sys.exit(f"broken: {', '.join(failed)}")
