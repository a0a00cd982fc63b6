"""The page in a real browser, where there is one: hostile texts stay text, and what axe says.

`make test-console` is the long form.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from urllib.parse import quote

import pytest

from tests.lib.console.support import TOKEN, World, group, world

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None or importlib.util.find_spec("playwright") is None,
    reason="needs Debian's chromium, and playwright (make test-console installs it)",
)


async def test_a_page_shows_what_it_is_given_and_obeys_none_of_it(redis_url: str) -> None:
    """The list, a conversation and its tokens, from a real store and the real application."""
    async with world(redis_url) as shown:
        names = await group(shown.client, "one", 1.0, 0.0)
        await asyncio.to_thread(_visit, shown, names[0])


def _visit(shown: World, rollout: str) -> None:
    from tests.suites.console.browser import AXE, launched, visiting
    from tests.suites.console.safety import hostile_texts_do_harm_as_markup, is_only_text

    link, run = f"{shown.url}/?token={TOKEN}", shown.client.run_id
    with launched() as browser, visiting(browser, link, run) as visit:
        page = visit.open("rollouts")
        assert page.locator("tbody tr").count() == 2
        assert not AXE.exists() or not visit.faults()
        is_only_text(f"rollouts/{quote(rollout, safe='')}")(visit)
        # The world has no scheduler: the browser tells that its state could not be read.
        assert not [error for error in visit.errors if "status of 503" not in error]
        hostile_texts_do_harm_as_markup(visit)
