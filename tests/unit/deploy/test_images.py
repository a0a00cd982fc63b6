"""One image for local development, one for each service in a deployment: what they hold."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path
from typing import Any

import pytest
from seamflow.release import __version__

from deploy.docker import mount_points, start
from deploy.docker.install import requirements_of, torch_of
from deploy.generate_secrets import SERVICES
from tests.lib.deploy.support import COMPOSE, IMAGES, ROOT, compose

PROJECT = ROOT / "pyproject.toml"


LOCAL = f"seamflow/local:{__version__}"


OTHERS = {"redis", "rollout-server-sglang"}
"""Services whose image is not the local one: it is not ours, or holds another engine."""


CHART_ONLY = {"node", "ranker-language-model"}
"""Images that no service of Compose runs from: the local one has what they have."""


def arguments(entry: dict[str, Any]) -> dict[str, str]:
    """Build arguments of a service; none without `build`."""
    found: dict[str, str] = entry.get("build", {}).get("args", {})
    return found


BUILT = {
    f"{file.name}-{name}": arguments(entry)
    for file in (COMPOSE, IMAGES)
    for name, entry in compose(file)["services"].items()
    if "build" in entry
}


def test_every_local_service_runs_from_one_image() -> None:
    """Built once, by the job that all others wait for."""
    services = compose()["services"]
    images = {name: each["image"] for name, each in services.items() if name not in OTHERS}
    assert set(images.values()) == {LOCAL}
    assert [name for name in images if "build" in services[name]] == ["secrets"]


def test_the_local_image_has_what_each_deployed_one_has() -> None:
    """All requirements of every service's own image, SGLang's environment apart."""
    local = set(requirements_of(arguments(compose()["services"]["secrets"])["EXTRA"], PROJECT))
    for name, given in BUILT.items():
        assert set(requirements_of(given["EXTRA"], PROJECT)) <= local, name


def test_control_an_image_without_the_ranker_s_extra_is_noticed() -> None:
    """Of the test above."""
    less = set(requirements_of("quickstart,secrets", PROJECT))
    assert not set(requirements_of("ranker", PROJECT)) <= less


@pytest.mark.parametrize("name", BUILT)
def test_an_image_is_on_torch_exactly_if_it_needs_torch(name: str) -> None:
    """Else each would have a torch of its own, or carry one that it never loads."""
    given = BUILT[name]
    on_torch = {"chassis": False, "torch": True}[given["SHARED"]]
    assert on_torch == bool(torch_of(requirements_of(given["EXTRA"], PROJECT)))
    assert {"BASE_IMAGE", "TORCH_INDEX_URL"} <= given.keys()


def test_the_images_of_prepare_hold_the_quickstart_s_model() -> None:
    """And no other; the job looks where they hold it, and they can make it."""
    assert {name for name, given in BUILT.items() if given.get("START") == "yes"} == {
        "docker-compose.yml-secrets",
        "compose.images.yml-prepare",
    }
    command = compose()["services"]["prepare"]["command"]
    assert command[command.index("--made") + 1] == start.FOLDER


def test_every_user_may_read_what_the_image_holds(tmp_path: Path) -> None:
    """Weights, which are written for their owner alone, too."""
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir(mode=0o700)
    weights.write_bytes(b"w")
    weights.chmod(0o600)
    start.make_readable(tmp_path)
    assert stat.S_IMODE(weights.stat().st_mode) == 0o644
    assert stat.S_IMODE(weights.parent.stat().st_mode) == 0o755


def test_every_service_has_an_image_of_its_own() -> None:
    """Of each service but Redis; replicas share theirs, and each image is built once."""
    local, deployed = compose()["services"], compose(IMAGES)["services"]
    assert deployed.keys() == (local.keys() - {"redis"}) | CHART_ONLY
    built = [each["image"] for each in deployed.values() if "build" in each]
    assert len(built) == len(set(built))
    assert {each["image"] for each in deployed.values()} == set(built)
    assert all(image.endswith(f":{__version__}") for image in built)
    assert LOCAL not in built


def test_the_overlay_changes_images_alone() -> None:
    """Confinement, secrets and commands stay those of docker-compose.yml."""
    for name, entry in compose(IMAGES)["services"].items():
        assert entry.keys() <= {"image", "build", "profiles"}, name
        if name not in CHART_ONLY:
            assert entry.get("profiles", ()) in ((), compose()["services"][name].get("profiles"))


def test_the_image_that_makes_secrets_has_a_place_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compose file mounts them; without `cryptography` an image makes none."""
    places = {volume.split(":")[1] for volume in compose()["services"]["secrets"]["volumes"]}
    assert places <= set(mount_points.mount_points())
    assert len(places) == len(SERVICES) + 1
    monkeypatch.setattr(mount_points, "find_spec", lambda _: None)
    assert mount_points.mount_points() == ["/data", "/weights", "/cache"]
    assert importlib.util.find_spec("cryptography") is not None
