"""`make test-roundtrips`: random conversations with tools through the gateway's prompts.

For each bundled model family, by default 1,000 conversations: the prompt of every turn has to begin
with the recorded ids of the turn before, unless the client or the template has rewritten the
history: then it has to leave the record there, and show nothing that was rewritten. As controls,
prompts that are encoded as a whole and messages that match by their roles alone must be noticed.

`--conversations N` has fewer; `--only hermes llama3` tries some families.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from bench.report import RESULTS, Report
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import History, Prompt
from tests.chaos.suite import broken_limits, exit_if_broken
from tests.suites.roundtrips.controls import RolesOnlyPrompt, reencoded
from tests.suites.roundtrips.families import FAMILIES
from tests.suites.roundtrips.recorded_gateway import PromptOf
from tests.suites.roundtrips.round_trip import FAILURES, RoundTrip

BENCH = "test-roundtrips"
_HISTORIES: Sequence[History] = get_args(History)
_CONTROL_CONVERSATIONS = 20
_CONTROLS: dict[str, tuple[PromptOf, str]] = {
    "encoded_as_a_whole": (reencoded, "prefix_mismatches"),
    "matched_by_role": (RolesOnlyPrompt.parse, "silent_mismatches"),
}
"""How prompts are read, and which failure has to be found."""


async def trips(
    name: str, folder: Path, seeds: Sequence[int], prompt_of: PromptOf = Prompt.parse
) -> tuple[Counter[str], list[str]]:
    """One conversation for each seed with this family; counts, and failures in words."""
    family = FAMILIES[name]
    template = ChatTemplate(family.make_model(folder))
    counts, failures = Counter[str](), list[str]()
    for seed in seeds:
        history = _HISTORIES[seed % len(_HISTORIES)]
        trip = RoundTrip(family, template, history, seed, prompt_of)
        await trip.run()
        counts += trip.counts
        failures += trip.failures
    return counts, failures


def figures_of(counts: Counter[str], *, families: int, conversations: int) -> dict[str, float]:
    """The figures by name."""
    held = counts["turns_continued"] - counts["prefix_mismatches"]
    return {
        "families": families,
        "conversations": families * conversations,
        **{name: counts[name] for name in sorted({*counts} - {*FAILURES})},
        "continued_share": held / max(counts["turns_continued"], 1),
        **{name: counts[name] for name in FAILURES},
    }


def main() -> None:
    """Have all conversations and the controls, print and write the figures; exit 1 on a failure."""
    given = _arguments()
    seeds = range(given.seed, given.seed + given.conversations)
    console, began = Console(stderr=True), time.monotonic()
    counts, raw = Counter[str](), list[float]()
    with tempfile.TemporaryDirectory(prefix="seamflow-roundtrips-") as scratch:
        for name in given.only:
            found, failures = asyncio.run(trips(name, Path(scratch, name), seeds))
            counts += found
            raw.append(found["turns"])
            console.print(f"{name}: {found['turns']} turns, {len(failures)} failures")
            console.print(*failures[:3], sep="\n", markup=False)
        figures = figures_of(counts, families=len(given.only), conversations=len(seeds))
        figures |= _controls(Path(scratch), given.only)
    figures["seconds"] = round(time.monotonic() - began, 1)
    report = Report(bench=BENCH, figures=figures, raw={"turns_of_family": raw}, seeds=[given.seed])
    complete = given.conversations >= 1000 and list(given.only) == list(FAMILIES)
    report.publish(RESULTS) if complete else report.show()
    exit_if_broken(broken_limits(figures, {}, FAILURES))


def _controls(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Conversations that must fail: how many there were, and how many failed."""
    failed = 0
    for control, (prompt_of, failure) in _CONTROLS.items():
        for name in names:
            seeds = range(_CONTROL_CONVERSATIONS)
            place = folder / f"{control}-{name}"
            counts, _ = asyncio.run(trips(name, place, seeds, prompt_of))
            failed += counts[failure] > 0
    return {"negative_controls": len(_CONTROLS) * len(names), "negative_controls_failed": failed}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=1000, help="by family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
