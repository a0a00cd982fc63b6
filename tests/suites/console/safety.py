"""What must not happen: text run as markup, access without a token; each check has a control."""

from __future__ import annotations

from collections.abc import Callable

from tests.suites.console.browser import Visit
from tests.suites.console.hostile_texts import HOSTILE, MARK, spoil_answers

_FOREIGN = "main script, main img, main iframe, main style, main b, main i, a[href^=javascript]"


def is_only_text(view: str, *, long_lines: bool = False) -> Callable[[Visit], None]:
    """With hostile texts in every answer, a view shows them, and obeys none."""

    def check(visit: Visit) -> None:
        visit.page.goto("about:blank")
        spoil_answers(visit.page, long_lines=long_lines)
        try:
            visit.open(view)
            _open_all(visit)
            _assert_text(visit, "<i>xxx" if long_lines else "script>")
        finally:
            visit.page.unroute_all(behavior="wait")

    return check


def _open_all(visit: Visit) -> None:
    visit.page.evaluate(
        "document.querySelectorAll('main details').forEach((d) => { d.open = true })"
    )
    visit.page.wait_for_timeout(100)


def _assert_text(visit: Visit, text: str) -> None:
    page = visit.page
    shown = page.locator("main").inner_text()
    assert text in shown, shown[:500]
    assert page.evaluate("globalThis.hacked") is None
    assert page.locator(_FOREIGN).count() == 0
    assert not any(character in shown for character in "\u202e\u2066\x1b\x00")
    assert visit.overflow() <= 0, f"{visit.overflow()} pixels too wide"


def without_a_token_there_is_a_way_in(visit: Visit) -> None:
    """The page says what to do and takes a token; no data is shown."""
    _without_cookie(visit)
    page = visit.page
    page.goto(f"{visit.address}/#/r/{visit.run}/overview")
    page.get_by_role("heading", name="Sign in").wait_for()
    assert "seamflow" in page.locator("main").inner_text()
    assert not visit.faults()
    _forgive(visit)


def a_stale_token_says_so(visit: Visit) -> None:
    """A link of a console that ran before."""
    _without_cookie(visit)
    response = visit.page.goto(f"{visit.address}/?token=of-yesterday")
    assert response is not None
    assert response.status == 401
    assert "token" in visit.page.locator("body").inner_text().lower()
    assert not visit.context.cookies()
    _forgive(visit)


def the_token_opens_by_hand(visit: Visit) -> None:
    """Typed into the page that asks for it; it does not stay in the address."""
    token = visit.token
    _without_cookie(visit)
    visit.page.goto(f"{visit.address}/#/runs")
    visit.page.get_by_label("Token").fill(token)
    visit.page.get_by_role("button", name="Sign in").click()
    visit.page.get_by_role("heading", name="Runs").wait_for()
    assert token not in visit.page.url
    (cookie,) = visit.context.cookies()
    assert cookie.get("httpOnly")
    assert cookie.get("sameSite") == "Strict"
    assert token not in str(cookie)
    _forgive(visit)


def only_its_own_files_are_loaded(visit: Visit) -> None:
    """The page names no other origin, and its policy forbids one."""
    addresses: list[str] = []
    visit.page.on("request", lambda request: addresses.append(request.url))
    response = visit.page.goto(f"{visit.address}/")
    visit.open("curves")
    assert response is not None
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert all(each.startswith(visit.address) for each in addresses), addresses


def _without_cookie(visit: Visit) -> None:
    visit.page.goto("about:blank")
    visit.context.clear_cookies()


def _forgive(visit: Visit) -> None:
    """The browser itself reports the status that was wanted."""
    visit.errors[:] = [each for each in visit.errors if "401" not in each]
    visit.page.goto("about:blank")
    visit.enter()


def hostile_texts_do_harm_as_markup(visit: Visit) -> None:
    """The same text on a page that parses it: the check above can fail."""
    page = visit.page
    page.goto("about:blank")
    page.evaluate("text => { document.body.innerHTML = text }", HOSTILE)
    visit.until("() => globalThis.hacked === 1")
    assert MARK in page.locator("body").inner_text()
    visit.errors.clear()


def axe_finds_faults(visit: Visit) -> None:
    """On a page that has some."""
    visit.page.goto("about:blank")
    visit.page.set_content("<html><body><img src='data:,'><button></button></body></html>")
    assert len(visit.faults()) >= 2
    visit.errors.clear()


def an_error_of_a_script_is_seen(visit: Visit) -> None:
    """The suite records the page's errors."""
    visit.page.goto("about:blank")
    visit.page.evaluate("setTimeout(() => { throw new Error('seen') })")
    visit.page.wait_for_timeout(200)
    assert any("seen" in each for each in visit.errors), visit.errors
    visit.errors.clear()


SAFETY = (
    without_a_token_there_is_a_way_in,
    a_stale_token_says_so,
    the_token_opens_by_hand,
    only_its_own_files_are_loaded,
)
CONTROLS = (hostile_texts_do_harm_as_markup, axe_finds_faults, an_error_of_a_script_is_seen)
