"""URLs of Redis: three topologies, and mistakes that name the field and the cure."""

from __future__ import annotations

import pytest
from redis.asyncio import RedisCluster, SSLConnection

from services.chassis.errors import ConfigError
from services.chassis.redis.connect import connect
from services.chassis.redis.url import parse_redis_url


def test_one_server() -> None:
    """What redis-py reads from a URL, with the usual port and database."""
    address = parse_redis_url("redis://user:p%40ss@store/3")
    assert address.topology == ""
    assert address.hosts == (("store", 6379),)
    assert address.options == {"username": "user", "password": "p@ss", "db": 3}
    assert parse_redis_url("redis://[::1]:7000").hosts == (("::1", 7000),)


def test_a_socket_of_this_machine() -> None:
    """It has no host; its database is an option."""
    address = parse_redis_url("unix://user:pass@/run/redis.sock?db=2")
    assert (address.topology, address.hosts) == ("", ())
    assert address.options["path"] == "/run/redis.sock"
    assert (address.options["username"], address.options["db"]) == ("user", 2)


def test_a_master_behind_sentinels() -> None:
    """Several hosts, the name of the service and the database."""
    address = parse_redis_url("redis+sentinel://:secret@a:1,b,c:3/tokens/2?health_check_interval=3")
    assert address.topology == "sentinel"
    assert address.hosts == (("a", 1), ("b", 26379), ("c", 3))
    assert address.service == "tokens"
    assert address.options == {"password": "secret", "db": 2, "health_check_interval": 3}
    assert parse_redis_url("redis+sentinel://a/tokens").options["db"] == 0


def test_a_cluster_with_tls() -> None:
    """rediss is TLS in every topology."""
    address = parse_redis_url("rediss+cluster://a:1,b:2/?ssl_ca_certs=ca.pem")
    assert address.topology == "cluster"
    assert address.hosts == (("a", 1), ("b", 2))
    assert address.options["connection_class"] is SSLConnection
    assert address.options["ssl_ca_certs"] == "ca.pem"
    assert isinstance(connect("rediss+cluster://a:1,b:2/"), RedisCluster)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://u:secret@a", "scheme is 'http'"),
        ("redis+ring://u:secret@a", "scheme is 'redis\\+ring'"),
        ("redis://u:secret@", "a host is missing"),
        ("redis+cluster://u:secret@a,,b/", "a host is missing"),
        ("redis://u:secret@a:port", "[Pp]ort"),
        ("redis://u:secret@a,b/0", "several hosts need"),
        ("redis://u:secret@a/zero", "the database is 'zero'"),
        ("redis+cluster://u:secret@a/1", "database 0 only"),
        ("redis+sentinel://u:secret@a,b,c", "name of the Sentinels' service is missing"),
        ("redis://u:secret@a/0?sockte_timeout=1", "sockte_timeout"),
        ("redis://u:secret@a/0?socket_timeout=soon", "socket_timeout"),
    ],
)
def test_mistakes_are_configuration_errors(url: str, complaint: str) -> None:
    """Each names the field and what is wrong, and none repeats the password."""
    with pytest.raises(ConfigError, match=f"^redis_url: .*{complaint}") as caught:
        connect(url)
    assert "secret" not in str(caught.value)
