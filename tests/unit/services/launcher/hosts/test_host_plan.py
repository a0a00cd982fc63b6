"""Addresses, certificates and secrets of a run on several hosts."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.x509 import (
    DNSName,
    IPAddress,
    SubjectAlternativeName,
    load_pem_x509_certificate,
)

from services.chassis.errors import ConfigError
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.hosts.other_hosts import host_variables
from services.launcher.hosts.run_certificates import JoinSecret, made_secret, secret_file, secured
from services.launcher.layout import Layout, host_addresses, places
from services.launcher.process_plan import plan
from tests.lib.launcher.support import make_config, make_layout

HOSTS = ("127.0.0.1", "127.0.0.2")
NODES = ("a: rollout train", "b: rollout train; host 1")


def on_two_hosts(folder: Path) -> tuple[LauncherConfig, Layout, dict[str, ProcessPlan]]:
    """A run whose trainer has a node on each host."""
    config = make_config(nodes=NODES, hosts=HOSTS, trainer_nodes=2)
    made = make_layout(config, folder)
    layout = replace(made, hosts=host_addresses(config), places=places(config))
    (folder / "run.toml").touch()
    return config, layout, plan(config, layout)


def test_processes_are_reached_where_they_are(tmp_path: Path) -> None:
    """Rank 0 may be on each host with a node that trains, so callers know all of them."""
    _, layout, processes = on_two_hosts(tmp_path)
    port = layout.ports["trainer"]
    agent = processes["node_agent-b"].environment
    assert agent["SEAMFLOW_NODE_AGENT_TRAINER"] == f"ipv4:127.0.0.1:{port},127.0.0.2:{port}"
    assert agent["SEAMFLOW_NODE_AGENT_ROLLOUT_SERVER"].startswith("127.0.0.2:")
    assert "--local-addr=127.0.0.2" in processes["trainer-b"].command
    assert {name for name, each in processes.items() if each.host} == {
        "rollout_server-b",
        "trainer-b",
        "node_agent-b",
    }


def test_each_service_of_each_host_has_a_certificate_of_its_own(tmp_path: Path) -> None:
    """It names identity and address, and the key is no other's; the agent has its own."""
    _, layout, processes = on_two_hosts(tmp_path)
    config, made = secured(*on_two_hosts(tmp_path))
    keys = {
        (each.host, each.table): each.environment[f"SEAMFLOW_{each.table}_TLS_KEY_FILE".upper()]
        for name, each in made.items()
        if name != "rendezvous"
    }
    texts = [Path(key).read_text() for key in set(keys.values())]
    assert len(set(texts)) == len(texts) == len(set(keys))
    assert str(config.tls_key_file).endswith("hosts/0/launcher/key.pem")
    server = made["rollout_server-b"].environment
    assert server["SEAMFLOW_ROLLOUT_SERVER_HOST"] == "127.0.0.2"
    assert server["SEAMFLOW_ROLLOUT_SERVER_CERTIFICATE_IDENTITIES"] == "true"
    assert made.keys() == processes.keys()
    assert layout.folder == tmp_path


def test_certificates_name_the_host_as_people_do(tmp_path: Path) -> None:
    """By the name in `hosts`, which is not the address that it stands for."""
    config = make_config(nodes=NODES, hosts=("localhost", "127.0.0.2"), trainer_nodes=2)
    hosts = ("127.0.0.1", "127.0.0.2")
    layout = replace(make_layout(config, tmp_path), hosts=hosts, places=places(config))
    named = config.replace(hosts=("first.example", "second.example"))
    secured(named, layout, plan(config, layout))
    for number, name in enumerate(named.hosts):
        pem = (tmp_path / f"hosts/{number}/trainer/cert.pem").read_bytes()
        names = load_pem_x509_certificate(pem).extensions.get_extension_for_class(
            SubjectAlternativeName
        )
        assert name in names.value.get_values_for_type(DNSName)
        addresses = map(str, names.value.get_values_for_type(IPAddress))
        assert set(hosts) <= set(addresses)


def test_the_users_own_certificates_are_refused(tmp_path: Path) -> None:
    """The launcher would overwrite what they mean."""
    config, layout, processes = on_two_hosts(tmp_path)
    with pytest.raises(ConfigError, match="take those out"):
        secured(config.replace(tls_ca_file=tmp_path / "run.toml"), layout, processes)


def test_the_secret_is_one_line_and_stays_the_same(tmp_path: Path) -> None:
    """Over starts of a run; for this user alone."""
    config, layout, processes = on_two_hosts(tmp_path)
    secured(config, layout, processes)
    first, text = made_secret(layout), secret_file(layout).read_text()
    assert JoinSecret.read(text) == first == made_secret(layout)
    assert len(text.splitlines()) == 1
    assert secret_file(layout).stat().st_mode & 0o077 == 0
    assert first.token not in repr(first)
    ssl.create_default_context(cadata=first.authority)


@pytest.mark.parametrize("text", ["", "token", "token.", ".QUJD", "token.!!"])
def test_a_text_that_is_no_secret_is_refused(text: str) -> None:
    """Without being shown."""
    with pytest.raises(ConfigError, match="the secret is not one that the launcher wrote"):
        JoinSecret.read(text)


def test_a_name_of_loopback_among_addresses_is_refused() -> None:
    """Others would not reach it."""
    config = make_config(nodes=NODES, hosts=("localhost", "10.0.0.2"), trainer_nodes=2)
    with pytest.raises(ConfigError, match=r"'localhost' stands for 127\.0\.0\.1"):
        host_addresses(config)


def test_the_own_name_stands_for_the_address_that_other_hosts_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the machine's hosts file has 127.0.1.1 for it; another machine's name stays refused."""
    known = {"here.net": "127.0.1.1", "there": "127.0.1.1", "10.0.0.2": "10.0.0.2"}
    monkeypatch.setattr("services.launcher.layout._resolved", known.__getitem__)
    monkeypatch.setattr("services.launcher.layout._address_towards", lambda other: "10.0.0.1")
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    own = make_config(nodes=NODES, hosts=("here.net", "10.0.0.2"), trainer_nodes=2)
    assert host_addresses(own) == ("10.0.0.1", "10.0.0.2")
    for hosts in (("there", "10.0.0.2"), ("10.0.0.2", "here.net")):
        other = make_config(nodes=NODES, hosts=hosts, trainer_nodes=2)
        with pytest.raises(ConfigError, match="which other machines do not reach"):
            host_addresses(other)


def test_calls_between_hosts_go_through_no_proxy() -> None:
    """What the user excepts stays excepted; an interface that is named stays."""
    given = {"no_proxy": "example.com", "GLOO_SOCKET_IFNAME": "eth7"}
    found = host_variables("127.0.0.2", HOSTS, given)
    assert found["no_proxy"] == "example.com,127.0.0.1,127.0.0.2"
    assert "GLOO_SOCKET_IFNAME" not in found
