"""Texts that a page must show and never obey, put into real answers of the API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

MARK = "hostile-7f3a"
"""By which a check finds the text on the page."""
HOSTILE = (
    f"{MARK} <script>globalThis.hacked = 1</script><img src=x onerror='globalThis.hacked = 1'>"
    "<svg onload='globalThis.hacked = 1'></svg><a href='javascript:globalThis.hacked = 1'>x</a>"
    "</div></main><style>*{display:none}</style> \u202eright to left\u202c \u2066isolate "
    "\x1b[31mred\x1b[0m \x00\x07\x08 \u200b ${globalThis.hacked = 1} {{constructor}}"
)
_TEXTS = frozenset(
    [
        "text",
        "task",
        "task_text",
        "cause",
        "what",
        "who",
        "for",
        "last_error",
        "next_action",
        "reason",
        "cure",
        "message",
        "name",
        "note",
        "finish",
        "model",
        "algorithm",
    ]
)
"""Fields of the API that hold what agents, models and errors wrote."""
_LONG = 1_000_000


def spoiled(answer: Any, key: str = "") -> Any:
    """The same answer with hostile texts; places of the form, such as ids, stay."""
    if isinstance(answer, dict):
        return {name: spoiled(value, name) for name, value in answer.items()}
    if isinstance(answer, list):
        return [_token(each) if key == "texts" else spoiled(each, key) for each in answer]
    if isinstance(answer, str) and key in _TEXTS:
        return HOSTILE
    return answer


def _token(text: Any) -> str:
    return f"{text}<b>\u202e\x1b[1m</b><script>globalThis.hacked = 1</script>"


def spoil_answers(page: Page, *, long_lines: bool = False) -> None:
    """From now on every answer of the API comes spoiled; `long_lines`: with a line of 1 MB."""

    def answer(route: Route) -> None:
        if route.request.url.endswith("/events"):
            route.continue_()
            return
        response = route.fetch()
        body = spoiled(_filled(response.json()))
        if long_lines:
            _lengthen(body)
        route.fulfill(response=response, body=json.dumps(body))
        return

    page.route("**/api/**", answer)


def _filled(body: Any) -> Any:
    """With an entry in each list of the overview, and a metric that is named like that."""
    for name in ("activities", "waiting", "warnings"):
        if name in body:
            body[name].append(dict.fromkeys(("what", "who", "for", "name", "text", "cure"), ""))
    if "steps" in body and "names" in body:
        body["names"].append(HOSTILE)
    return body


def _lengthen(body: Any) -> None:
    for turn in body.get("turns", []):
        for part in turn["parts"]:
            part["text"] = "<i>" + "x" * _LONG
