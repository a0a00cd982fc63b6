"""What a deployment keeps secret, and that it is made once."""

from __future__ import annotations

import asyncio
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from deploy.generate_secrets import ACCOUNTS, SERVICES, generate
from services.chassis.redis.connect import connect
from services.lib.redis_binary import find_redis_server
from tests.deploy.support import ROOT, content, secrets

SCRIPT = ROOT / "deploy" / "generate_secrets.py"


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    """Containers that start again keep their identities."""
    authority, out = tmp_path / "authority", tmp_path / "secrets"
    assert generate(authority, out)
    before = content(tmp_path)
    assert not generate(authority, out)
    assert content(tmp_path) == before


def test_only_a_new_service_gets_a_new_certificate(tmp_path: Path) -> None:
    """An upgrade: what an older release made stays, and its authority signs for the ranker."""
    authority, out = tmp_path / "authority", secrets(tmp_path)
    complete = content(tmp_path)
    for name in ("cert.pem", "key.pem"):
        (out / "ranker" / name).unlink()
    (out / "ranker").rmdir()
    before = content(tmp_path)
    assert generate(authority, out)
    after = content(tmp_path)
    assert after.keys() == complete.keys()
    assert {name: after[name] for name in before} == before
    certificate = x509.load_pem_x509_certificate((out / "ranker" / "cert.pem").read_bytes())
    certificate.verify_directly_issued_by(
        x509.load_pem_x509_certificate((out / "ca.pem").read_bytes())
    )


@pytest.mark.parametrize("left", [["cert.pem"], ["cert.pem", ".key.pem.partial"]])
def test_an_interrupted_addition_of_a_service_is_completed(tmp_path: Path, left: list[str]) -> None:
    """An upgrade that was cut off, before or while the key was written, is run again."""
    authority, out = tmp_path / "authority", secrets(tmp_path)
    complete = content(tmp_path)
    folder = out / "ranker"
    (folder / "key.pem").unlink()
    for name in left:
        (folder / name).write_bytes(b"half")
    assert generate(authority, out)
    after = content(tmp_path)
    assert after.keys() == complete.keys()
    mine = [name for name in after if "ranker" in str(name)]
    assert [name for name in after if after[name] != complete[name]] == mine
    context = ssl.create_default_context(cafile=out / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    assert not generate(authority, out)


@pytest.mark.parametrize("lost", ["authority/ca.key", "secrets/.complete"])
def test_an_incomplete_set_is_an_error_and_not_overwritten(tmp_path: Path, lost: str) -> None:
    """The operator decides about the rest; exit code 78 and the cure."""
    out = secrets(tmp_path)
    (tmp_path / lost).unlink()
    before = content(tmp_path)
    authority = tmp_path / "authority"
    command: list[str | Path] = [sys.executable, SCRIPT, "--authority", authority, "--out", out]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 78
    assert "empty both folders" in ended.stderr
    assert content(tmp_path) == before


def test_no_two_deployments_share_a_secret(tmp_path: Path) -> None:
    """Nothing secret has a default."""
    first, second = content(secrets(tmp_path / "a")), content(secrets(tmp_path / "b"))
    assert first.keys() == second.keys()
    same = {name for name in first if first[name] == second[name]}
    assert same == {".complete"}


def test_secrets_are_not_world_readable(tmp_path: Path) -> None:
    """Files are for owner and group alone, and the authority's key is not among them."""
    out = secrets(tmp_path)
    for path in out.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0, path
    assert "ca.key" not in content(out)


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_a_certificate_for_its_names(tmp_path: Path, service: str) -> None:
    """Signed by the authority, for the compose names and this host, and no authority itself."""
    out = secrets(tmp_path)
    certificate = x509.load_pem_x509_certificate((out / service / "cert.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((out / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    wanted = {service, *SERVICES[service], "localhost"}
    assert set(names.get_values_for_type(x509.DNSName)) == wanted
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca


def test_tls_libraries_accept_them(tmp_path: Path) -> None:
    """A key fits its certificate, and the chain loads."""
    out = secrets(tmp_path)
    context = ssl.create_default_context(cafile=out / "ca.pem")
    context.load_cert_chain(out / "weights" / "cert.pem", out / "weights" / "key.pem")


async def test_a_service_reaches_its_own_keys_only(tmp_path: Path) -> None:
    """With the generated users own keys work; others' keys and wrong passwords do not."""
    out = secrets(tmp_path)
    users = tmp_path / "users.acl"
    users.write_bytes((out / "redis" / "users.acl").read_bytes())
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
        for service in ACCOUNTS:
            url = (out / service / "redis_url").read_text()
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
        assert await nobody.ping()
        with pytest.raises(NoPermissionError):
            await nobody.get(keys["weights"])
        await nobody.aclose()
    finally:
        server.terminate()
        await server.wait()
