"""Watching goes on after whatever it raises."""

from __future__ import annotations

import asyncio

import pytest

from services.launcher.report.view import View


async def test_each_error_is_told_once_and_the_call_is_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three calls fail in two ways, the fourth answers."""
    answers = [ValueError("a"), ValueError("a"), KeyError("b"), None]
    done = asyncio.Event()

    async def act() -> None:
        if (error := answers.pop(0)) is not None:
            raise error
        done.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(View().repeat("one look", act, 0))
    await done.wait()
    task.cancel()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("one look failed")] == [
        "one look failed, and is repeated: ValueError: a",
        "one look failed, and is repeated: KeyError: 'b'",
    ]
