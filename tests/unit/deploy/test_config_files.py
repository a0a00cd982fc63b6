"""The deployment's configuration files, read by the very classes that will read them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from services.chassis.config.load import load
from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from tests.lib.deploy.support import CONFIG, compose, secrets

# File name -> table, module of the config class, its name.
CLASSES = {
    "trajectory-manager": ("trajectory_manager", "trajectory_manager.config"),
    "rollout-gateway": ("rollout_gateway", "rollout.gateway.config"),
    "http-gateway": ("http_gateway", "rollout.http_gateway.config"),
    "rollout-server": ("rollout_server", "rollout.server.config"),
    "scheduler": ("scheduler", "scheduler.config"),
    "trainer": ("trainer", "trainer.config.trainer_config"),
    "weights": ("weights", "services.weights.config"),
    "node-agent": ("node_agent", "services.node_agent.config"),
    "dataloader": ("dataloader", "services.dataloader.config"),
    "evaluator": ("evaluator", "services.evaluator.config"),
    "ranker": ("ranker", "services.ranker.config"),
    "scoring": ("scoring", "services.scoring.config"),
    "environments": ("environments", "services.environments.config"),
    "tool-loop": ("tool_loop", "services.tool_loop.config"),
    "console": ("console", "services.console.config"),
    "run": ("run", "deploy.create_run"),
}
ADDRESSES = (
    "trajectory_manager",
    "scheduler",
    "weights",
    "rollout_server",
    "trainer",
    "gateway",
    "rollout_gateway",
    "ranker",
    "evaluator",
    "environment",
)


def config_class(module: str) -> type[ServerConfig]:
    """The config class that the module defines."""
    members = vars(importlib.import_module(module)).values()
    (found,) = [
        member
        for member in members
        if isinstance(member, type)
        and issubclass(member, ServerConfig)
        and member.__module__ == module
    ]
    return found


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The secrets of a deployment; read only."""
    return secrets(tmp_path_factory.mktemp("generated"))


def loaded(
    name: str, generated: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ServerConfig:
    """The file `name`.toml with its secrets, and the environment compose gives its service."""
    text = (CONFIG / f"{name}.toml").read_text()
    file = folder / f"{name}.toml"
    own = "create-run" if name == "run" else name
    file.write_text(text.replace("/secrets/", f"{generated / own}/"))
    service = next(
        service
        for service in compose()["services"].values()
        if any(f"/{name}.toml" in str(word) for word in service.get("command", ()))
    )
    for variable, value in service.get("environment", {}).items():
        monkeypatch.setenv(variable, str(value))
    table, module = CLASSES[name]
    return load(config_class(module), table, ["--config", str(file)])


def test_every_file_is_known() -> None:
    """A new file is tested, or this fails."""
    assert {path.stem for path in CONFIG.glob("*.toml")} == CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_each_file_loads(
    name: str, generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No unknown key, nothing missing; mutual TLS by which services are known, and no token."""
    config = loaded(name, generated, tmp_path, monkeypatch)
    assert config.certificate_identities
    assert config.token is None
    assert config.operator_token is None
    assert (config.agent_token is not None) == (name == "rollout-gateway")
    assert config.tls_ca_file is not None
    assert config.tls_cert_file is not None
    assert not config.development


def test_control_a_misspelt_key_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    path = tmp_path / "weights.toml"
    path.write_text('[weights]\nfoldr = "/data"\n')
    with pytest.raises(ConfigError, match="folder"):
        load(config_class("services.weights.config"), "weights", ["--config", str(path)])


@pytest.mark.parametrize("name", CLASSES)
def test_every_address_is_a_service(
    name: str, generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other services are named as in compose, with the port that their own file sets."""
    config, services = loaded(name, generated, tmp_path, monkeypatch), compose()["services"]
    for field in ADDRESSES:
        address = getattr(config, field, None)
        if isinstance(address, str):
            host, _, port = address.partition(":")
            (file,) = [w for w in services[host]["command"] if str(w).endswith(".toml")]
            assert f"port = {port}\n" in (CONFIG / Path(file).name).read_text()
