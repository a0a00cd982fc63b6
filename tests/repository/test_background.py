"""A task that outlives its function tells of its end: it is started by `in_background`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.repository.test_architecture import PACKAGES, files_of, module_of

_ALLOWED = {
    "rollout.http_gateway.turn_routes": "the reply to which it belongs waits for it",
    "rollout.server.engines.fake": "`wait_failed` raises its error, which restarts the engine",
    "rollout.server.engines.sglang.server_process": "`ended` waits for it",
    "rollout.server.weights.transports.shard_stream": "the end of the file raises its error",
    "seamflow.channel": "waits for a connection; what calls get is another matter",
    "seamflow.environment.episode": "the first step raises its error",
    "seamflow.environment.mcp_connection": "each call raises its error",
    "services.chassis.redis.scripts": "each caller gets its error",
    "services.console.sources.run_state": "whoever asks next gets its error",
    "services.launcher.supervisor": "tells of its own errors",
    "services.lib.child_process": "`ended` waits for it",
    "services.ranker.ranker": "the loop beside it raises its error, which ends the process",
    "trainer.background.background_task": "training ends by its error",
    "trainer.background.sample_recorder": "logs each error: people miss a step",
}


def kept_tasks(source: str) -> Iterator[str]:
    """Attributes of objects that `asyncio.create_task` is assigned to."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called, target = node.value.func, node.targets[0]
            is_task = isinstance(called, ast.Attribute) and called.attr == "create_task"
            if is_task and isinstance(target, ast.Attribute | ast.Subscript):
                yield ast.unparse(target)


def test_a_task_that_is_kept_tells_of_its_end() -> None:
    """A new place needs a reason, and one that is gone leaves the list."""
    found = {
        module_of(file)
        for package in PACKAGES
        for file in files_of(package)
        if list(kept_tasks(file.read_text(encoding="utf-8")))
    }
    assert found == set(_ALLOWED)


def test_only_tasks_that_are_kept_are_found() -> None:
    """Control: one of a function that awaits it is not."""
    source = "self.a = asyncio.create_task(f())\nb = asyncio.create_task(f())\nself.c = g(f())"
    assert list(kept_tasks(source)) == ["self.a"]
