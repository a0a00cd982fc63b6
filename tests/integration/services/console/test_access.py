"""Access by link, cookie and bearer token; all other requests and origins are refused."""

from __future__ import annotations

import pytest
from yarl import URL

from tests.lib.console.support import TOKEN, World, world


async def test_the_link_lets_a_browser_in_and_its_cookie_stays(redis_url: str) -> None:
    """The cookie is out of reach for scripts and for other sites; the page itself tells nothing."""
    async with world(redis_url) as shown:
        assert await _status(shown, "/") == 200
        assert await _status(shown, "/api/runs") == 401
        async with shown.http.get(f"{shown.url}/", params={"token": TOKEN}) as entered:
            assert entered.status == 200
            (cookie,) = entered.cookies.values()
        assert cookie["httponly"] and cookie["samesite"] == "Strict" and cookie["path"] == "/"
        assert TOKEN not in cookie.value
        known = {"Cookie": f"{cookie.key}={cookie.value}"}
        assert await _status(shown, "/api/runs", known) == 200
        assert await _status(shown, "/api/runs", {"Cookie": f"{cookie.key}=x"}) == 401


async def test_a_wrong_token_gets_a_page_that_says_where_the_right_one_is(redis_url: str) -> None:
    """A stale link, such as that of an earlier start."""
    async with (
        world(redis_url) as shown,
        shown.http.get(f"{shown.url}/", params={"token": "stale"}) as refused,
    ):
        assert refused.status == 401
        assert not refused.cookies
        assert "seamflow train" in await refused.text()


async def test_other_sites_and_other_names_are_refused(redis_url: str) -> None:
    """Even with the secret: a page of another site, and a name that was made to resolve here."""
    own = {"Authorization": f"Bearer {TOKEN}"}
    async with world(redis_url) as shown:
        assert await _status(shown, "/api/runs", own) == 200
        for foreign in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert await _status(shown, "/api/runs", {**own, **foreign}) == 403
            assert await _status(shown, "/", {**own, **foreign}) == 403
        same = {**own, "Origin": shown.url}
        assert await _status(shown, "/api/runs", same) == 200


async def test_every_answer_forbids_what_is_not_of_the_console(redis_url: str) -> None:
    """Pages, files, API, errors and the event stream; what is of a run is not cached."""
    own = {"Authorization": f"Bearer {TOKEN}"}
    async with world(redis_url) as shown:
        events = f"/api/runs/{shown.client.run_id}/events"
        for path in ("/", "/static/index.html", "/api/runs", "/api/nothing", events):
            async with shown.http.get(f"{shown.url}{path}", headers=own) as response:
                assert "default-src 'self'" in response.headers["Content-Security-Policy"]
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Referrer-Policy"] == "no-referrer"
                assert (response.headers["Cache-Control"] == "no-store") == ("/api/" in path)


async def test_nothing_can_be_written(redis_url: str) -> None:
    """The console has no route that changes anything."""
    async with world(redis_url) as shown:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with shown.http.request(
                method, f"{shown.url}/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}
            ) as response:
                assert response.status == 405


async def test_files_outside_the_pages_are_not_served(redis_url: str) -> None:
    """Whatever the path says."""
    async with world(redis_url) as shown:
        for path in ("/static/../config.py", "/static/%2e%2e/config.py", "/static//etc/passwd"):
            url = f"{shown.url}{path}"
            async with shown.http.get(URL(url, encoded=True)) as response:
                assert response.status in (403, 404)


async def test_without_the_checks_strangers_are_answered(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: it is these two that refuse."""
    monkeypatch.setattr("services.console.app.check_source", lambda *_: None)
    async with world(redis_url) as shown:
        own = {"Authorization": f"Bearer {TOKEN}"}
        assert await _status(shown, "/api/runs", {**own, "Host": "evil.example"}) == 200
        monkeypatch.setattr("services.console.app.Login.knows", lambda *_: True)
        assert await _status(shown, "/api/runs") == 200


async def _status(shown: World, path: str, headers: dict[str, str] | None = None) -> int:
    async with shown.http.get(f"{shown.url}{path}", headers=headers or {}) as response:
        return response.status
