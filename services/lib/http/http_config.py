"""Settings of a process that serves HTTP."""

from __future__ import annotations

from pydantic import Field

from services.chassis.config.settings import ServerConfig


class HttpConfig(ServerConfig):
    """Settings of every HTTP server."""

    http_port: int = Field(0, ge=0, le=65535)
    """Port of HTTP; 0 takes a free one."""
    share_port: bool = False
    """Let other replicas on this machine listen on http_port too: the kernel spreads connections,
    and a call that is repeated because one was killed finds another."""
    public_url: str = ""
    """URL under which others reach this server, such as "https://rollouts.example.org"; empty: by
    its address."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which this server is requested, besides addresses, localhost, this machine's name
    and that of `public_url`; requests with another `Host`, or with the `Origin` of a web page of
    another site, are refused. Beyond loopback, with tokens, empty allows every name."""
