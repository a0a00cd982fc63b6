"""The one form of every measurement: a JSON line for programs, a table for people.

{"bench": name, "figures": {name: number}, "raw": {name: [samples]}, "seeds": [],
 "versions": {package: version}, "peers": {name: {package: version}},
 "commit": commit, "date": day, "machine": processor, "runs": samples per figure, "code": digest}
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.provenance import provenance

RESULTS = Path(__file__).parent / "results"
"""Where figures are kept that pages show."""
MIN_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a measurement found.

    Example: Report(bench="store", figures={"appends_per_second": 9000.0}, seeds=[0])
    """

    bench: str
    """Its name; the file in bench/results/ is called so."""
    figures: Mapping[str, float]
    """The figures, by name."""
    raw: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Every sample behind them."""
    seeds: Sequence[int] = ()
    """Seeds used."""
    packages: Sequence[str] = ("seamflow", "torch", "transformers", "grpcio", "protobuf", "redis")
    """Distributions whose versions matter."""
    peers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of each peer with an environment of its own: version by distribution."""

    def show(self) -> None:
        """Print the table, for a run that leaves no file."""
        table = Table(title=self.bench)
        for column in ("figure", "value"):
            table.add_column(column)
        for name, value in self.figures.items():
            table.add_row(name, f"{value:,.4g}")
        Console().print(table)

    def publish(self, folder: Path = RESULTS) -> None:
        """Print the table, write the file, and end with the JSON line."""
        self.show()
        line = json.dumps(self._as_dict())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.bench}.json").write_text(line + "\n")
        print(line, flush=True)

    def _versions(self) -> dict[str, str]:
        """The page shows no figures of another release of seamflow."""
        return _versions(("seamflow", *self.packages))

    def _as_dict(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "figures": dict(self.figures),
            "raw": {name: list(samples) for name, samples in self.raw.items()},
            "seeds": list(self.seeds),
            "versions": {
                "python": platform.python_version(),
                **_versions(("seamflow", *self.packages)),
            },
            "peers": {name: dict(versions) for name, versions in self.peers.items()},
            **provenance(self.raw),
        }


def ratio(ours: Sequence[float], theirs: Sequence[float], least: int = MIN_SAMPLES) -> float:
    """Median of the ratios of interleaved samples, ours over theirs.

    Raises `ValueError` for fewer than `least` samples of a side, or sides of unequal length.
    """
    if len(ours) != len(theirs) or len(ours) < least:
        raise ValueError(
            f"{len(ours)} and {len(theirs)} samples: give at least {least}, as many of each"
        )
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2


def ratios(
    name: str, ours: Sequence[float], theirs: Sequence[float], least: int = MIN_SAMPLES
) -> dict[str, float]:
    """Figures of a comparison: `ratio`, and the lowest and highest of a single round."""
    of_rounds = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        name: ratio(ours, theirs, least),
        f"{name}_lowest": min(of_rounds),
        f"{name}_highest": max(of_rounds),
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # not every measurement needs every package
    return found


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all do not exceed."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]
