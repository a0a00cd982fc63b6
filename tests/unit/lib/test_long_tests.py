"""A test that `make test` leaves out names the file with its short form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import check_short_form


def marked(**given: object) -> Any:
    """What pytest collects of a test that is `long`."""
    marks = [SimpleNamespace(kwargs=given)]
    return SimpleNamespace(nodeid="test_it", iter_markers=lambda name: marks * (name == "long"))


@pytest.mark.parametrize("given", [{}, {"short": ""}, {"short": "tests/unit/lib/no_such_test.py"}])
def test_a_long_test_without_a_short_form_is_refused(given: dict[str, object]) -> None:
    """And named; control: with a file that is there it passes."""
    with pytest.raises(pytest.UsageError, match="test_it: long"):
        check_short_form(marked(**given))
    check_short_form(marked(short="tests/unit/lib/test_long_tests.py"))
