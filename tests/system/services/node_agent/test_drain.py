"""SIGTERM to a node agent in the middle of a turn, with everything around it real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from seamflow.processes import procfs
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from tests.integration.rollout.gateway.test_gateway import agent, first_chunk
from tests.lib.node_agent.support import active
from tests.lib.redis_server import free_port
from tests.lib.scheduler.support import ROOT, RUN, Process, list_nodes, running_scheduler

NUM_TOKENS = 400


async def test_a_drain_migrates_running_turns(tmp_path: Path) -> None:
    """The agent's caller gets every token of the turn; the scheduler gives the node no work."""
    ports = {name: free_port() for name in "ab"}
    addresses = [f"127.0.0.1:{port}" for port in ports.values()]
    async with (
        running_scheduler() as (scheduler_port, stub),
        agent(tmp_path, *addresses) as one,
        AsyncExitStack() as stack,
    ):
        nodes = {}
        for name, port in ports.items():
            nodes[name] = _node(tmp_path / name, name, port, scheduler_port)
            stack.callback(nodes[name].end, signal.SIGKILL)
        await asyncio.gather(*(node.start() for node in nodes.values()))
        for name in ports:
            await active(stub, name, "rollout")
        turn = one.generate("turn", max_new_tokens=NUM_TOKENS)
        chunk = (await first_chunk(turn)).chunk
        name, token_ids = chunk.tokens.spans[0].server_id, list(chunk.tokens.token_ids)
        server = _server(tmp_path / name)
        ended = asyncio.create_task(asyncio.to_thread(nodes[name].end, signal.SIGTERM))
        servers = {name}
        while len(token_ids) < NUM_TOKENS:
            chunk = (await first_chunk(turn)).chunk
            token_ids += chunk.tokens.token_ids
            servers |= {span.server_id for span in chunk.tokens.spans}
        assert await ended == 0
        assert servers == set(ports)
        assert await one.recorded("turn") == token_ids
        left = (await list_nodes(stub))[name]
        assert (left.assignment.tag, left.state) == ("", pb.NODE_STATE_DRAINING)
        assert not procfs.is_alive(server)


def _node(folder: Path, name: str, port: int, scheduler_port: int) -> Process:
    folder.mkdir()
    flags = {
        "engine": "fake",
        "run-id": RUN,
        "server-id": name,
        "port": port,
        "admin-port": -1,
        "fake-step-seconds": 0.005,
        "fake-mean-tokens": 0,
        "fake-vocab-size": 200,
    }
    words = [sys.executable, "-m", "rollout.server", *(f"--{k}={v}" for k, v in flags.items())]
    path = os.pathsep.join([str(ROOT / "sdk"), str(ROOT)])
    server = {
        "command": words,
        "address": f"127.0.0.1:{port}",
        "environment": {"PYTHONPATH": path},
    }
    return Process(
        "services.node_agent",
        folder,
        node_id=name,
        run_id=RUN,
        capability_tags="rollout",
        scheduler=f"127.0.0.1:{scheduler_port}",
        rollout_server=f"127.0.0.1:{port}",
        processes=json.dumps({"server": server}),
        state_folder=folder / "state",
    )


def _server(folder: Path) -> procfs.Identity:
    """The rollout server's process, as the node agent has written it down."""
    entry = json.loads((folder / "state" / "processes.json").read_text())["server"]
    return procfs.Identity(*entry["members"][0])
