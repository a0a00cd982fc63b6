"""The compose file, as far as it can be judged without starting it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deploy.generate_secrets import SERVICES
from services.chassis.rpc.identities import Identity
from tests.lib.deploy.support import COMPOSE, ROOT, compose

PROCESSES = {
    "trajectory_manager",
    "rollout.gateway",
    "rollout.http_gateway",
    "rollout.server",
    "scheduler",
    "trainer",
    "services.weights",
    "services.node_agent",
    "services.dataloader",
    "services.evaluator",
    "services.ranker",
    "services.scoring",
    "services.environments",
    "services.tool_loop",
    "services.console",
    "seamflow.runner",
}
NAMES = sorted(compose()["services"])


def service(name: str) -> dict[str, Any]:
    """One service of the file."""
    found: dict[str, Any] = compose()["services"][name]
    return found


def test_every_process_has_a_service() -> None:
    """Every process of a run, and Redis."""
    modules = {
        entry["command"][0] for entry in compose()["services"].values() if "command" in entry
    }
    assert modules >= PROCESSES
    assert "redis" in NAMES


def test_compose_version_1_can_read_it() -> None:
    """Nothing that only version 2 knows."""
    document = compose()
    assert not {"name", "include", "version"} & document.keys()
    for entry in document["services"].values():
        assert not {"gpus", "develop", "provider", "post_start"} & entry.keys()


@pytest.mark.parametrize("name", NAMES)
def test_each_service_is_confined(name: str) -> None:
    """Read-only, no capability, no way to gain one, no way around the image's user."""
    entry = service(name)
    assert entry["read_only"]
    assert entry["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in entry["security_opt"]
    assert not entry.get("privileged")
    assert entry.get("user", "10001").split(":")[0] not in ("0", "root")
    published = entry.get("ports", ())
    assert bool(published) == (name in ("rollout-gateway", "http-gateway", "console"))
    assert all(each.startswith("127.0.0.1:") for each in published), "for this machine alone"


@pytest.mark.parametrize("name", NAMES)
def test_each_service_refers_to_what_exists(name: str) -> None:
    """Modules, configuration files, volumes and the services it waits for."""
    entry = service(name)
    for other in entry.get("depends_on", {}):
        assert other in NAMES
    for volume in entry.get("volumes", ()):
        source = volume.split(":")[0]
        exists = (
            (ROOT / source).exists() if source.startswith(".") else source in compose()["volumes"]
        )
        assert exists, volume
    for word in entry.get("command", ()):
        if str(word).startswith("/app/"):
            assert (ROOT / Path(word).relative_to("/app")).is_file()
    if "command" in entry:
        assert find_spec(entry["command"][0]) is not None


@pytest.mark.parametrize("name", NAMES)
def test_dependencies_wait_for_health_or_completion(name: str) -> None:
    """Conditions are healthy or completed, and who is waited for has a health check or ends."""
    for other, wanted in service(name).get("depends_on", {}).items():
        awaited = service(other)
        if wanted["condition"] == "service_healthy":
            assert not awaited.get("healthcheck", {}).get("disable")
        else:
            assert wanted["condition"] == "service_completed_successfully"
            assert awaited["restart"] == "no"


def mounts(name: str) -> dict[str, str]:
    """Volume -> where the service mounts it, with its mode."""
    return dict(volume.split(":", 1) for volume in service(name).get("volumes", ()))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"secrets"}))
def test_each_service_sees_its_own_secrets_alone(name: str) -> None:
    """Read-only, one volume at most, and none sees what is the authority's."""
    mine = {volume: place for volume, place in mounts(name).items() if "secrets" in volume}
    assert "authority" not in mounts(name)
    own = next((each for each in SERVICES if name in (each, *SERVICES[each].hosts)), None)
    assert mine == ({f"secrets-{own}": "/secrets:ro"} if own else {})


def test_the_secrets_job_writes_each_service_s_volume() -> None:
    """All of them, and the authority's."""
    wanted = {f"secrets-{name}": f"/secrets/{name}" for name in SERVICES}
    assert mounts("secrets") == {"authority": "/authority", **wanted}
    assert {each for each in compose()["volumes"] if "secrets" in each} == wanted.keys()


def test_every_certificate_is_for_a_service() -> None:
    """Names in certificates are names of services, and each service that serves has one."""
    named = {host for name, each in SERVICES.items() for host in (each.hosts or (name,))}
    assert named == set(NAMES) - {"secrets", "prepare"}


def test_every_identity_is_known() -> None:
    """The policy has an entry for each certificate, but for that of Redis."""
    named = {each.identity or name for name, each in SERVICES.items()}
    assert named - set(Identity) == {"redis"}


def test_no_secret_is_in_the_compose_file() -> None:
    """No password, token or key in any file of the deployment; images are pinned."""
    secret = re.compile(
        r"(password|passwd|requirepass|token|secret)\s*[:=]\s*[\"']?(?!/)\w{4,}", re.I
    )
    files = [COMPOSE, *(ROOT / "deploy").rglob("*.toml"), *(ROOT / "deploy").rglob("*.yml")]
    for path in [*files, *(ROOT / "deploy").rglob("*.conf"), *(ROOT / "deploy").rglob("*file")]:
        found = [m for m in secret.finditer(path.read_text()) if "/secrets" not in m.group()]
        assert not found, f"{path}: {found}"
    for name in NAMES:
        assert not service(name)["image"].endswith(":latest")


def test_redis_is_durable_and_closed() -> None:
    """Every acknowledged write on disk, nothing evicted, TLS with client certificates, users."""
    lines = set((ROOT / "deploy" / "config" / "redis.conf").read_text().splitlines())
    assert lines >= {
        "port 0",
        "tls-auth-clients yes",
        "aclfile /secrets/redis/users.acl",
        "appendonly yes",
        "appendfsync always",
        "maxmemory-policy noeviction",
    }
