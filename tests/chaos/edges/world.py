"""The processes of `make chaos-edges`: Redis, trajectory manager, rollout servers, gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from seamflow.channel import connect
from seamflow.client import Client
from seamflow.durations import to_duration
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from bench.harness import processes
from bench.harness.byte_model import APPENDING, make_byte_model
from bench.harness.processes import Server
from bench.harness.redis_process import FAST, redis_server

RUN_ID = "edges"
_VOCABULARY = 261
_FAULTY = "tests.chaos.edges.faulty_engine"
_LARGE = 1 << 30
LIMITS_OFF = {
    "MAX_MESSAGE_BYTES": _LARGE,
    "MAX_PROMPT_BYTES": _LARGE,
    "MAX_CALLS_PER_ROLLOUT": 100_000,
    "MAX_INFLIGHT_BYTES": _LARGE << 4,
    "MAX_WAITING_PROMPTS": 100_000,
    "MAX_RENDER_SECONDS": 600,
    "MAX_RENDER_BYTES": 16 << 30,
}
"""Constants of a gateway whose limits are far away."""
SETTINGS_OFF = {"max_request_bytes": 64 << 20, "max_prompt_tokens": _LARGE}
"""Settings of such a gateway."""
EJECTION_OFF = {"EJECTION_FAILURES": 0}
"""Constants of a gateway that keeps every server in use."""


LOOPS, GROWS = "loops", "grows"
"""Texts of a message at which the model's template loops, or takes much memory."""
# Not a constant: templates are folded when they are compiled.
_TEMPLATE = (
    f"{{% if messages[-1].content == '{LOOPS}' %}}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    f"{{% elif messages[-1].content == '{GROWS}' %}}"
    "{{ 'x' * (messages | length * 100000000) }}{% endif %}"
    f"{APPENDING}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What runs."""

    gateway: Server
    """The gateway's process."""
    manager: Server
    """The trajectory manager's."""

    def client(self) -> Client:
        """An agent's client."""
        return Client(self.gateway.address, run_id=RUN_ID)


@asynccontextmanager
async def world(
    folder: Path,
    limits: Mapping[str, int],
    engines: Sequence[str] = ("fake",),
    step_seconds: float = 0.0,
    settings: Mapping[str, int] | None = None,
) -> AsyncIterator[World]:
    """One rollout server for each engine, "fake" or a fault.

    `limits` are constants of the gateway that are changed, `settings` are its settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        redis_url = stack.enter_context(redis_server(FAST))
        manager = processes.manager(folder, redis_url, durability="fast")
        stack.enter_context(manager)
        servers = [
            stack.enter_context(_rollout_server(folder / str(i), engine, step_seconds))
            for i, engine in enumerate(engines)
        ]
        addresses = json.dumps([server.address for server in servers])
        given = {
            "run_id": RUN_ID,
            "model": _model(folder / "model"),
            "trajectory_manager": manager.address,
            "servers": addresses,
            **(settings or {}),
        }
        changed = {"rollout.gateway.limits": limits}
        found = processes.service("rollout.gateway", "rollout_gateway", folder, changed, **given)
        stack.enter_context(found)
        await _create_run(manager.address)
        yield World(gateway=found, manager=manager)


def _model(folder: Path) -> Path:
    made = make_byte_model(folder, _TEMPLATE)
    config = {"model_type": "llama", "vocab_size": _VOCABULARY}
    (made / "config.json").write_text(json.dumps(config))
    return made


def _rollout_server(folder: Path, engine: str, step_seconds: float) -> Server:
    folder.mkdir()
    return processes.service(
        "rollout.server",
        "rollout_server",
        folder,
        engine=engine if engine == "fake" else f"{_FAULTY}:{engine}",
        run_id=RUN_ID,
        server_id=f"server-{folder.name}",
        max_running=64,
        max_context=8192,
        fake_mean_tokens=8,
        fake_vocab_size=_VOCABULARY,
        fake_step_seconds=step_seconds,
    )


async def _create_run(manager: str) -> None:
    rules = trajectory_pb2.RunConfig(
        group_size=4,
        groups_per_step=1000,
        max_staleness=10,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
        lease_duration=to_duration(60),
        durability=trajectory_pb2.DURABILITY_FAST,
        reward_name="reward",
    )
    async with connect(manager) as channel:
        stub = async_stub(RunServiceStub, channel)
        request = run_pb.CreateRunRequest(run_id=RUN_ID, config=rules)
        await retrying(lambda: stub.CreateRun(request), timeout=60)
