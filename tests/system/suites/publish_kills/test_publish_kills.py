"""The short form of `make test-publish-kills`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.weights.support import describe
from tests.suites.publish_kills.kill_rig import Rig, wrong_loads
from tests.suites.publish_kills.publishing_sender import contents


@pytest.mark.timeout(120)
async def test_kills_in_mid_publish_leave_no_wrong_version(tmp_path: Path, redis_url: str) -> None:
    """A sender and a weights service; without verification a damaged byte is served, and seen."""
    rig = Rig(folder=tmp_path, redis_url=redis_url)
    try:
        await rig.run(["sender", "weights"], seed=1)
        assert rig.wrong() == []
        (found,) = await rig.control()
        assert found.endswith("has other files than its step")
    finally:
        rig.close()


def test_a_mixed_and_an_early_version_are_found() -> None:
    """By the check that judges the kills."""
    one, other = ({f.name: f.sha256 for f in describe(contents(step))} for step in (1, 2))
    published = [
        {"version": step, "step": step, "phase": "commit", "time": 10.0 * step} for step in (1, 2)
    ]
    first, *rest = one
    mixed = {first: one[first], **{name: other[name] for name in rest}}

    def found(version: int, files: dict[str, str], time: float) -> list[str]:
        return wrong_loads([{"version": version, "files": files, "time": time}], published)

    assert found(1, one, 11.0) == []
    assert len(found(2, one, 21.0)) == len(found(2, mixed, 21.0)) == 1
    assert len(found(2, {first: other[first]}, 21.0)) == 1
    assert len(found(2, other, 19.0)) == 1
