"""What a deployment keeps secret, and that it is made once."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import ssl
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from cryptography import x509
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from deploy.generate_secrets import SERVICES, generate
from services.chassis.redis.connect import connect
from services.chassis.rpc.identities import URI
from services.launcher.redis.redis_binary import find_redis_server
from tests.deploy.support import ROOT, content, secrets
from tests.redis_server import RedisServer

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
    shutil.rmtree(out / "ranker")
    before = content(tmp_path)
    assert generate(authority, out)
    after = content(tmp_path)
    assert after.keys() == complete.keys()
    assert {name: after[name] for name in before} == before
    certificate_of(out, "ranker").verify_directly_issued_by(
        x509.load_pem_x509_certificate((out / "ranker" / "ca.pem").read_bytes())
    )


@pytest.mark.parametrize("left", [["cert.pem"], ["cert.pem", ".key.pem.partial"]])
def test_what_was_cut_off_is_completed(tmp_path: Path, left: list[str]) -> None:
    """Run again after it ended before or while a key was written."""
    authority, out = tmp_path / "authority", secrets(tmp_path)
    complete = content(tmp_path)
    folder = out / "ranker" / "ranker"
    (folder / "key.pem").unlink()
    for name in left:
        (folder / name).write_bytes(b"half")
    assert generate(authority, out)
    after = content(tmp_path)
    assert after.keys() == complete.keys()
    changed = {name for name in after if after[name] != complete[name]}
    assert changed == {f"secrets/ranker/ranker/{name}" for name in ("cert.pem", "key.pem")}
    context = ssl.create_default_context(cafile=out / "ranker" / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    assert not generate(authority, out)


@pytest.mark.parametrize("lost", ["redis", "weights"])
def test_a_lost_volume_is_made_again_with_the_same_passwords(tmp_path: Path, lost: str) -> None:
    """Redis and its clients still agree."""
    authority, out = tmp_path / "authority", secrets(tmp_path)
    before = content(out)
    shutil.rmtree(out / lost)
    assert generate(authority, out)
    after = content(out)
    assert after.keys() == before.keys()
    for name in ("redis/redis/users.acl", "weights/weights/redis_url"):
        assert after[name] == before[name]


def test_the_authority_of_release_0_2_is_kept(tmp_path: Path) -> None:
    """It has a key alone, whose old certificates are still accepted by those with new ones."""
    authority, old = tmp_path / "authority", secrets(tmp_path)
    for path in authority.iterdir():
        if path.name != "ca.key":
            path.unlink()
    new = tmp_path / "new"
    assert generate(authority, new)
    certificate_of(old, "trainer").verify_directly_issued_by(
        x509.load_pem_x509_certificate((new / "weights" / "ca.pem").read_bytes())
    )


def test_renewal_changes_certificates_and_the_agents_token(tmp_path: Path) -> None:
    """And nothing that a running service reads at its start alone: passwords, the CA."""
    authority, out = tmp_path / "authority", secrets(tmp_path)
    before = content(out)
    assert generate(authority, out, renew=True)
    after = content(out)
    renewed = {name.rpartition("/")[2] for name in after if after[name] != before[name]}
    assert renewed == {"cert.pem", "key.pem", "agent_token"}
    token = (out / "agent-runner" / "agent_token").read_bytes()
    digest = hashlib.sha256(token).hexdigest()
    assert (out / "rollout-gateway" / "agent_token").read_text() == f"sha256:{digest}"


def test_secrets_without_their_authority_are_not_overwritten(tmp_path: Path) -> None:
    """The operator decides about the rest; exit code 78 and the cure."""
    out, authority = secrets(tmp_path), tmp_path / "authority"
    shutil.rmtree(authority)
    before = content(out)
    command: list[str | Path] = [sys.executable, SCRIPT, "--authority", authority, "--out", out]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
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


def certificate_of(out: Path, service: str) -> x509.Certificate:
    """A service's own."""
    file = out / service / service / "cert.pem"
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_no_two_deployments_share_a_secret(tmp_path: Path) -> None:
    """Nothing secret has a default."""
    first, second = content(secrets(tmp_path / "a")), content(secrets(tmp_path / "b"))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] == second[name]] == []


def test_no_service_has_what_another_one_needs(tmp_path: Path) -> None:
    """Each private thing is in one folder alone: who breaks into one service has its own."""
    out = secrets(tmp_path)
    holders = defaultdict(set)
    for name, bytes_ in content(out).items():
        if not name.endswith(("/ca.pem", "cert.pem")):
            holders[bytes_].add(name.partition("/")[0])
    assert [names for names in holders.values() if len(names) > 1] == []
    assert holders[(out / "agent-runner" / "agent_token").read_bytes()] == {"agent-runner"}


def test_secrets_are_not_world_readable(tmp_path: Path) -> None:
    """Files are for owner and group alone, and the authority's key is not among them."""
    out = secrets(tmp_path)
    for path in (*out.rglob("*"), *(tmp_path / "authority").iterdir()):
        assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) & 0o007 == 0, path
    keys = [name for name in content(out) if "ca.key" in name]
    assert keys == []


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_a_certificate_for_its_names(tmp_path: Path, service: str) -> None:
    """Signed by the authority, for the compose names and this host, and no authority itself."""
    out = secrets(tmp_path)
    certificate = certificate_of(out, service)
    authority = x509.load_pem_x509_certificate((out / service / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    wanted = {service, *SERVICES[service].hosts, "localhost"}
    assert set(names.get_values_for_type(x509.DNSName)) == wanted
    identity = SERVICES[service].identity or service
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"{URI}{identity}"]
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca


def test_tls_libraries_accept_them(tmp_path: Path) -> None:
    """A key fits its certificate, and the chain loads."""
    out = secrets(tmp_path)
    folder = out / "weights"
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "weights" / "cert.pem", folder / "weights" / "key.pem")


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
