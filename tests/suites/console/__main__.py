"""`make test-console`: the pages of the console in a real browser, beside a run that trains.

`--keep FOLDER`: where screenshots are kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import RESULTS, Report
from tests.suites.console.browser import AXE, Visit, chromium, launched, visiting
from tests.suites.console.checks import Check, Checks
from tests.suites.console.interactions import INTERACTIONS
from tests.suites.console.large_store import large_figures
from tests.suites.console.open_clients import client_figures
from tests.suites.console.safety import CONTROLS, SAFETY, is_only_text
from tests.suites.console.screens import SCREENS, has_no_fault, views
from tests.suites.console.trained_run import TrainedRun, console, training

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BENCH = "test-console"
STEPS = 16
_SHOWS_STEP = """step =>
  Number(document.querySelector("main").textContent.match(/up to step (\\d+)/)?.[1]) >= step"""
_STORE_SECONDS = 60.0
"""Until the store of a run that has ended is read."""
_WINDOWS = ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"))


def main() -> None:
    """Try all, print and write the figures; exit 1 if a check failed."""
    given = _arguments()
    _require()
    given.keep.mkdir(parents=True, exist_ok=True)
    checks = Checks(folder=given.keep)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="console-") as name:
        with launched() as browser:
            _try_run(checks, browser, Path(name))
        large, clients = large_figures(Path(name)), client_figures(Path(name) / "clients")
        checks.figures |= {f"large.{key}": value for key, value in large.items()}
        checks.figures |= {f"clients.{key}": value for key, value in clients.items()}
    figures = {
        "checks": checks.passed + len(checks.failed),
        "checks_failed": len(checks.failed),
        **checks.figures,
        "seconds": round(time.monotonic() - began, 1),
    }
    Report(bench=BENCH, figures=figures).publish(RESULTS)
    for failed, why in checks.failed.items():
        print(f"{failed}: {why}", file=sys.stderr)
    raise SystemExit(1 if checks.failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, default=Path("runs/test-console"))
    return parser.parse_args()


def _require() -> None:
    if chromium() is None:
        sys.exit("missing Debian package: apt-get install chromium")
    if not AXE.exists():
        sys.exit(f"missing {AXE}: npm install --prefix {AXE.parents[2]}")


def _try_run(checks: Checks, browser: Browser, folder: Path) -> None:
    with training(folder, STEPS) as run:
        run.wait_for_step(3)
        with visiting(browser, run.link(), run.folder.name) as visit:
            checks.one(visit, "a step is shown while the run trains", _follows(run, checks))
            checks.one(visit, "a rollout is offered while the run trains", _offers)
            checks.one(visit, "a server that stands still is named", _names_the_server(run))
        run.process.wait(300)
    for name in ("other", "third", "fourth"):
        _copied(run.folder, name)
    with console(folder, str(run.folder)) as shown:
        _try_finished(checks, browser, shown.link, run.folder.name)


def _copied(folder: Path, name: str) -> None:
    """A second run to lay beside the first: the same under another name."""
    copy = folder.parent / name
    shutil.copytree(folder, copy, symlinks=True)
    addresses = json.loads((copy / "addresses.json").read_text())
    (copy / "addresses.json").write_text(json.dumps({**addresses, "run_id": name}))


def _try_finished(checks: Checks, browser: Browser, link: str, run: str) -> None:
    with visiting(browser, link, run) as visit:
        visit.page.goto(f"{visit.address}/#/r/{run}/rollouts")
        visit.settle(_STORE_SECONDS)
        checks.run(visit, SCREENS)
        checks.run(visit, INTERACTIONS)
        checks.run(visit, SAFETY)
        checks.run(visit, CONTROLS, "control:")
        visit.enter()
        shown = views(visit)
        for name, view in shown.items():
            checks.one(visit, f"hostile texts: {name}", is_only_text(view))
        long = is_only_text(shown["transcript"], long_lines=True)
        checks.one(visit, "lines of 1 MB: transcript", long)
    for width, scheme in _WINDOWS:
        with visiting(browser, link, run, width=width, scheme=scheme) as visit:
            for name, view in {**shown, "runs": ""}.items():
                _look(checks, visit, f"{name} {width} {scheme}", view)


def _look(checks: Checks, visit: Visit, name: str, view: str) -> None:
    checks.one(visit, f"no fault: {name}", has_no_fault(view))
    checks.picture(visit, name)


def _follows(run: TrainedRun, checks: Checks) -> Check:
    def check(visit: Visit) -> None:
        page = visit.open("overview")
        page.get_by_role("heading", name="Reward, up to step").wait_for()
        step = run.steps()[-1] + 1
        run.wait_for_step(step)
        made = time.monotonic()
        visit.until(_SHOWS_STEP, step)
        checks.figures["seconds_until_step_is_shown"] = round(time.monotonic() - made, 2)

    return check


def _names_the_server(run: TrainedRun) -> Check:
    """And since when, which goes on; the card is gone with its cause."""

    def check(visit: Visit) -> None:
        (server,) = run.processes("rollout.server")
        page = visit.open("overview")
        card = page.locator(".card", has_text="does not answer")
        assert not card.count()
        server.suspend()
        try:
            card.wait_for()
            since = card.locator("[data-since]").first
            shown = since.inner_text()
            visit.until(
                "shown => document.querySelector('.card [data-since]').textContent !== shown", shown
            )
        finally:
            server.resume()
        card.wait_for(state="detached")

    return check


def _offers(visit: Visit) -> None:
    visit.open("rollouts").locator(".fresh").wait_for()


if __name__ == "__main__":
    main()
