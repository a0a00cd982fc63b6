"""HTTP gateway settings, table [http_gateway]."""

from __future__ import annotations

from pydantic import Field

from services.lib.http.http_config import HttpConfig


class HttpGatewayConfig(HttpConfig):
    """Settings of an HTTP gateway. Any number may serve one run; none keeps state that matters."""

    run_id: str
    """Training job whose rollouts it serves."""
    http_port: int = Field(0, ge=0, le=65535)
    """Port that agents use; 0 takes a free one."""
    rollout_gateway: str = "127.0.0.1:50052"
    """Address of the rollout gateway; several as "ipv4:10.0.0.1:50052,10.0.0.2:50052"."""
    public_url: str = ""
    """Start of the base URLs given to agents, such as "https://rollouts.example.org"; empty: the
    host that the agent itself requested."""
    hold_seconds: float = Field(20.0, ge=0)
    """How long a reply is held back: until then its HTTP status is open, and a client's SDK repeats
    a call whose gateway was killed. Later a stream is sent as it is sampled, any other reply starts
    with white space, and both are kept alive. 0 sends tokens at once."""
    default_max_tokens: int = Field(16384, ge=1)
    """Token budget of a call that names none."""
    turn_timeout_seconds: float = Field(3600.0, gt=0)
    """Longest duration of a call for one turn."""
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    """Largest body of a request."""
