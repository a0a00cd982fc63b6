"""Modules of the page that only compute, as a JavaScript engine runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from services.console.app import STATIC

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node here; the page needs none")


def computed(module: str, expression: str, given: object = None) -> Any:
    """What an expression over the exports `m` of a module and the value `given` gives."""
    script = (
        f"const m = await import({json.dumps((STATIC / module).as_uri())});"
        f"const given = {json.dumps(given)};"
        f"console.log(JSON.stringify({expression}));"
    )
    command = [str(NODE), "--no-warnings", "--input-type=module", "-e", script]
    return json.loads(subprocess.check_output(command, text=True))


def test_a_link_names_a_view_and_gives_it_back() -> None:
    """Whatever names and filters contain."""
    view = {"run": "a/b c", "screen": "rollouts", "id": "7@1/0 ?&#", "query": {"text": "x=1&y #"}}
    made = "m.parseHash(m.link(given.run, given.screen, given.id, given.query))"
    assert computed("lib/route.js", made, view) == view
    assert computed("lib/route.js", "m.parseHash('#/r/%zz/steps')")["run"] == "%zz"


def test_control_characters_are_seen() -> None:
    """Escapes, directions, zero widths; lines and tabs stay, as other scripts do."""
    text = "a\x1b[1m\u202eb\u200b\ufeff\x00\n\tשלום é"
    shown = computed("lib/format.js", "m.visible(given)", text)
    assert shown == "a⟨U+001B⟩[1m⟨U+202E⟩b⟨U+200B⟩⟨U+FEFF⟩⟨U+0000⟩\n\tשלום é"


def test_numbers_are_written_for_people() -> None:
    """Missing ones are a dash."""
    values = (
        "[m.number(null), m.number(0.00001234), m.number(-2.5), m.integer(1234567), m.percent(0.5)]"
    )
    assert computed("lib/format.js", values) == [
        "–",
        "1.2e-5",
        "−2.5",
        "1\u202f234\u202f567",
        "50\u202f%",
    ]
    spans = "[0.05, 3.21, 61, 7325, 200000].map(m.duration)"
    assert computed("lib/format.js", spans) == [
        "50 ms",
        "3.2 s",
        "1 min 01 s",
        "2 h 02 min",
        "2 d 7 h",
    ]


def test_equal_parts_are_aligned_and_words_compared() -> None:
    """Each text is whole in its side of the comparison."""
    one, other = ("user", "text", "add 1 and 2"), ("assistant", "text", "it is 3")
    parts = [dict(zip(("role", "kind", "text"), part, strict=True)) for part in (one, other)]
    longer = [parts[0], {**parts[1], "text": "let me see"}, parts[1]]
    rows = computed("lib/word_diff.js", "m.alignParts(given[0], given[1])", [parts, longer])
    assert [(row["same"], row["a"] is None) for row in rows] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    texts = ["the sum is  3.\n", "the answer is 4.\n"]
    sides = computed("lib/word_diff.js", "m.wordDiff(given[0], given[1])", texts)
    assert ["".join(text for text, _ in side) for side in sides] == texts
    assert [text for text, shared in sides[0] if not shared] == ["sum ", "3.\n"]


def test_a_histogram_counts_every_value_once() -> None:
    """In bins of equal width, also when all values are equal."""
    counts = "m.bins(given).map((bin) => bin.counts)"
    values = [[0, 0.5, 1, 1, None], [2]]
    totals = computed("lib/histogram.js", counts, values)
    assert [sum(each) for each in zip(*totals, strict=True)] == [4, 1]
    assert computed("lib/histogram.js", counts, [[3, 3]]) == [[2]]


def test_a_tail_of_short_spans_is_one() -> None:
    """What a screen cannot show apart is not drawn apart; no time is lost."""
    span = '{activity: "rollout", start: index / 100, end: (index + 1) / 100}'
    spans = f"Array.from({{length: 10000}}, (_, index) => ({span}))"
    shown = computed("lib/timeline.js", f"m.spansWithin({spans}, [0, 1000])")
    assert len(shown) < 100
    assert shown[0]["from"] == 0
    assert shown[-1]["to"] == pytest.approx(100)
