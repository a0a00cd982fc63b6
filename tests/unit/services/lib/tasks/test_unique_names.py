"""Two rows with one task id are an error."""

from __future__ import annotations

import pytest

from services.chassis.errors import ConfigError
from services.lib.tasks.unique_names import UniqueNames


def test_a_second_row_of_a_name_is_named_with_the_first() -> None:
    """The same row again, as in another epoch, is none."""
    names = UniqueNames()
    names.add("a", "tasks.jsonl:1")
    names.add("b", "tasks.jsonl:2")
    names.add("a", "tasks.jsonl:1")
    with pytest.raises(ConfigError) as refused:
        names.add("a", "tasks.jsonl:9")
    for part in ("'a'", "tasks.jsonl:1", "tasks.jsonl:9", "task_id_field"):
        assert part in str(refused.value)
