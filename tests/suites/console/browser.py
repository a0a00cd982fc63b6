"""A headless Chromium whose pages are watched: an error in its console is a failure."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

AXE = Path(__file__).parent / "node" / "node_modules" / "axe-core" / "axe.min.js"
"""The rules of accessibility, from npm."""
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
SECONDS = 30.0
"""How long a check waits for what it wants to see."""
_SETTLED = """() => {
  const main = document.getElementById("main");
  return main.dataset.view === location.hash && !main.querySelector("progress");
}"""
_FAULTS = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
  .filter((each) => ["serious", "critical"].includes(each.impact))
  .map((each) => `${each.id}: ${each.nodes.slice(0, 3).map((node) => node.html).join(" | ")}`)"""


def chromium() -> str | None:
    """The browser of this machine (Debian's package chromium), if there is one."""
    return shutil.which("chromium")


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser, closed afterwards."""
    from playwright.sync_api import sync_playwright  # imports of the suite work without it

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass(slots=True, kw_only=True)
class Visit:
    """A page of a console, and what went wrong in it."""

    context: BrowserContext
    page: Page
    link: str
    """That the console printed."""
    run: str
    """The run that is looked at."""
    errors: list[str] = field(default_factory=list)
    """Errors of its console and its scripts."""

    @property
    def address(self) -> str:
        """Of the console, without the token."""
        return self.link.partition("/?")[0]

    @property
    def token(self) -> str:
        """Of the link."""
        return self.link.partition("token=")[2]

    def enter(self) -> None:
        """Open the link, as a person does first."""
        self.page.goto(self.link)
        self.page.locator("main h1").first.wait_for()

    def open(self, view: str) -> Page:
        """Show a view of the run, such as `steps/3?order=low`, until nothing is loaded any more."""
        return self.open_hash(f"#/r/{self.run}/{view}")

    def open_hash(self, fragment: str) -> Page:
        """Show what a link of the console names."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/{fragment}")
        self.settle()
        return self.page

    def settle(self, seconds: float = SECONDS) -> None:
        """Wait until the view of the link is shown, and nothing is read any more."""
        self.until(_SETTLED, seconds=seconds)

    def until(self, condition: str, value: object = None, *, seconds: float = SECONDS) -> None:
        """Wait for a function of the page to be true.

        Playwright's own wait evaluates text within the page, which the page's policy forbids.
        """
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(condition, value):
            assert time.monotonic() < deadline, f"not so within {seconds} s: {condition}"
            self.page.wait_for_timeout(20)  # route handlers run meanwhile

    def fragment(self) -> str:
        """The link of the present view."""
        found: str = self.page.evaluate("location.hash")
        return found

    def faults(self) -> list[str]:
        """What axe-core calls serious or critical in what is shown."""
        self.page.evaluate(AXE.read_text())
        found: list[str] = self.page.evaluate(_FAULTS)
        return found

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        root = "document.documentElement"
        found: int = self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")
        return found


@contextmanager
def visiting(
    browser: Browser, link: str, run: str, *, width: int = 1280, scheme: Any = "light"
) -> Iterator[Visit]:
    """A fresh profile that enters by the link that the console printed."""
    height = 860 if width > 500 else 844
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(SECONDS * 1000)
    page = context.new_page()
    visit = Visit(context=context, page=page, link=link, run=run)
    page.on("console", lambda message: _note(visit, message))
    page.on("pageerror", lambda error: visit.errors.append(f"script: {error}"))
    try:
        visit.enter()
        yield visit
    finally:
        context.close()


def _note(visit: Visit, message: ConsoleMessage) -> None:
    if message.type in ("error", "warning"):
        visit.errors.append(f"{message.type}: {message.text}")
