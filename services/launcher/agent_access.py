"""What an agent in a process of its own needs: addresses, a token, and how to lease a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping

from seamflow.inspect.snapshot import Snapshot

from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout

_HINT_SECONDS = 30.0


def agent_variables(config: LauncherConfig, layout: Layout) -> Mapping[str, str]:
    """Environment variables of an agent's program.

    SEAMFLOW_HTTP_GATEWAY is the base URL of the HTTP gateway, SEAMFLOW_GATEWAY host:port of the
    rollout gateway, SEAMFLOW_RUN_ID the run, and SEAMFLOW_AGENT_TOKEN the bearer token of agents
    where there is one. SEAMFLOW_RUN is for the command `seamflow`.
    """
    token = config.agent_token or config.token
    return {
        "SEAMFLOW_HTTP_GATEWAY": base_url(config, layout),
        "SEAMFLOW_GATEWAY": layout.address("rollout_gateway"),
        "SEAMFLOW_RUN_ID": layout.run_id,
        "SEAMFLOW_RUN": layout.run_id,
        **({} if token is None else {"SEAMFLOW_AGENT_TOKEN": token.get_secret_value()}),
    }


def instructions(config: LauncherConfig, layout: Layout) -> str:
    """How an agent connects: the addresses, and how it gets a rollout and its credential."""
    url, gateway = base_url(config, layout), layout.address("rollout_gateway")
    is_open = config.agent_token is None and config.token is None
    header = "" if is_open else '-H "authorization: Bearer $SEAMFLOW_AGENT_TOKEN" '
    credentials = "" if is_open else ", credentials=Credentials(token=…)"
    return f"""\
agents connect to run {layout.run_id!r} at {url} (gRPC: {gateway})
  lease a rollout: the answer has its task, base_url and credential
    curl {header}--json '{{"wait_seconds": 20}}' {url}/rollouts/lease
  call the model, then POST /rollouts/ID/finish (docs/agents.md)
    OpenAI(base_url=rollout["base_url"], api_key=rollout["credential"])
  or over gRPC, in Python
    await Client("{gateway}", run_id="{layout.run_id}"{credentials}).lease_rollouts()
  for programs
    export SEAMFLOW_HTTP_GATEWAY={url} SEAMFLOW_GATEWAY={gateway} SEAMFLOW_RUN_ID={layout.run_id}"""


def base_url(config: LauncherConfig, layout: Layout) -> str:
    """Start of the HTTP gateway's URLs."""
    scheme = "http" if config.tls_ca_file is None else "https"
    return f"{scheme}://{layout.address('http_gateway')}"


class LeaseHint:
    """Notices when work waits and no agent takes it."""

    def __init__(self, advice: str, *, are_tasks_own: bool, seconds: float = _HINT_SECONDS) -> None:
        """`advice` says what to do; it is given after `seconds` without a rollout under way.

        `are_tasks_own`: agents bring their own tasks, so that none wait in the queue.
        """
        self._advice, self._seconds, self._are_tasks_own = advice, seconds, are_tasks_own
        self._idle_since: float | None = None
        self._has_leased = False

    def look(self, snapshot: Snapshot, now: float) -> str | None:
        """What to tell people, once in each idle time; `now` in seconds of a monotonic clock."""
        ready = snapshot.readiness
        if ready is None or not snapshot.answering_servers:
            return None
        self._has_leased |= ready.num_running_rollouts > 0
        has_work = ready.num_admissible_groups and (ready.num_queued_tasks or self._are_tasks_own)
        if ready.num_running_rollouts or not has_work:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= self._seconds:
            self._idle_since = math.inf
            since = f"for {self._seconds:.0f} s" if self._has_leased else "yet"
            return f"no agent has leased a task {since}: {self._advice}"
        return None
