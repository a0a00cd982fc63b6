"""Generated secrets as their script, Redis and its clients use them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from deploy.generate_secrets import generate
from services.chassis.redis.connect import connect
from services.lib.redis_binary import find_redis_server
from tests.lib.deploy.support import ROOT, content, secrets
from tests.lib.redis_server import RedisServer


def test_secrets_without_their_authority_are_not_overwritten(tmp_path: Path) -> None:
    """The operator decides about the rest; exit code 78 and the cure."""
    out, authority = secrets(tmp_path), tmp_path / "authority"
    shutil.rmtree(authority)
    before = content(out)
    program = (sys.executable, "-m", "deploy.generate_secrets")
    command: list[str | Path] = [*program, "--authority", authority, "--out", out]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 78
    assert "to begin anew" in ended.stderr
    assert content(out) == before
    with pytest.raises(FileExistsError, match="another authority"):
        generate(authority_of(tmp_path / "b"), out)
    assert content(out) == before


def authority_of(folder: Path) -> Path:
    """Another deployment's."""
    secrets(folder)
    return folder / "authority"


async def test_a_service_reaches_its_own_keys_only(tmp_path: Path) -> None:
    """With the generated users own keys work; others' keys and wrong passwords do not."""
    out = secrets(tmp_path)
    users = tmp_path / "users.acl"
    users.write_bytes((out / "redis" / "redis" / "users.acl").read_bytes())
    socket = tmp_path / "redis.sock"
    arguments = [find_redis_server(), "--port", "0", "--save", "", "--dir", str(tmp_path)]
    arguments += ["--unixsocket", str(socket), "--aclfile", str(users)]
    server = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(20):
            while not socket.exists():
                await asyncio.sleep(0.01)
        keys = {
            "trajectory-manager": "sf:{run}:config",
            "weights": "sf:weights:{run}:policy:counters",
            "scheduler": "sf:scheduler:{pool}:nodes",
        }
        for service in keys:
            url = (out / service / service / "redis_url").read_text()
            password = url.split(":", 2)[2].split("@")[0]
            redis = connect(f"unix://{service}:{password}@{socket}")
            for owner, key in keys.items():
                if owner == service:
                    assert await redis.eval("return redis.call('SET', KEYS[1], 1)", 1, key)
                    continue
                with pytest.raises(NoPermissionError):
                    await redis.get(key)
            with pytest.raises(NoPermissionError):
                await redis.flushall()
            assert await redis.config_get("appendonly")
            await redis.aclose()
            wrong = connect(f"unix://{service}:wrong@{socket}")
            with pytest.raises(RedisConnectionError, match="invalid username-password"):
                await wrong.ping()
            await wrong.aclose()
        nobody = connect(f"unix://{socket}")
        with pytest.raises(RedisConnectionError, match="Authentication required"):
            await nobody.ping()
        await nobody.aclose()
        health = connect(f"unix://health:any@{socket}")
        assert await health.ping()
        with pytest.raises(NoPermissionError):
            await health.get(keys["weights"])
        await health.aclose()
    finally:
        server.terminate()
        await server.wait()


async def test_a_restart_loses_no_transaction(tmp_path: Path) -> None:
    """Redis 7.0 loads its file as the default user, who must therefore be allowed to write."""
    users = secrets(tmp_path) / "redis" / "redis" / "users.acl"
    assert users.read_text().startswith("user default off resetpass ~* &* +@all\n")
    server = RedisServer(tmp_path / "data", {"aclfile": str(users)})
    url = (tmp_path / "secrets" / "scheduler" / "scheduler" / "redis_url").read_text()
    password = url.split(":", 2)[2].split("@")[0]
    own, key = server.url.replace("//", f"//scheduler:{password}@"), "sf:scheduler:{pool}:nodes"
    server.start()
    async with connect(own) as redis, redis.pipeline(transaction=True) as transaction:
        transaction.set(key, 1)
        transaction.incr(key)
        await transaction.execute()
    server.kill()
    server.start()
    async with connect(own) as redis:
        assert await redis.get(key) == b"2"
    server.kill()
