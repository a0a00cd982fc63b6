"""The boxes of an answer, and what math-verify alone would call equal."""

from __future__ import annotations

import pytest

from services.tool_loop.math_answers.boxes import has_open_box, last_boxes


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\boxed{1}", ["1"]),
        (r"\boxed{\frac{1}{2}} and \boxed{\{3\}}.", [r"\frac{1}{2}", r"\{3\}"]),
        (r"\boxed{1}, so it is \boxed{2}", ["2"]),
        (r"\boxed{1} \boxed{", ["1"]),
        (r"\boxed{\boxed{1}}", [r"\boxed{1}"]),
        ("none", []),
    ],
)
def test_connected_boxes_at_the_end_count(text: str, contents: list[str]) -> None:
    assert [box.content for box in last_boxes(text)] == contents


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        (r"\boxed{4}", False),
        (r"\boxed{4}. Again: \boxed{", True),
        (r"\boxed{4}. Again: \boxed{\frac{1}{2}", True),
        (r"\boxed{4}. Again: \boxed", True),
        (r"\boxed{4. Again: \boxed{5}", False),
        (r"\boxed 4", False),
        ("4", False),
    ],
)
def test_an_open_last_box_is_seen(text: str, is_open: bool) -> None:
    assert has_open_box(text) is is_open
