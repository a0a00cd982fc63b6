"""What a run meets beside its data: rewards that differ by rounding, files of any name."""

from __future__ import annotations

import atexit
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import strategies

from services.launcher.supervisor import child_environment
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.support import other_run, rewarded
from tests.suites.field.event_loop import run
from tests.suites.field.kind import Kind
from trajectory_manager.model.records import Durability
from trajectory_manager.store.interface import Store
from trajectory_manager.store.redis.connect import redis_store

__all__ = ["KINDS"]

_SHOUT = "import sys; sys.stderr.write('the file of the user ran\\n'); sys.exit(3)\n"
_NAMES = sorted(
    {"services", "trainer", "scheduler", "rollout", "trajectory_manager", "tools", "seamflow"}
    | {name for name in sys.stdlib_module_names if not name.startswith("_")}
    | {"redis", "torch", "numpy", "grpc", "pydantic", "structlog", "google"}
)

_stores: list[Store] = []


async def _store() -> Store:
    """Of a Redis server that lives as long as this process."""
    if not _stores:
        server = RedisServer(Path(tempfile.mkdtemp(prefix="seamflow-field-redis-")))
        server.start()
        stack = AsyncExitStack()
        _stores.append(
            await stack.enter_async_context(redis_store(server.url, Durability.FAST, 5.0))
        )
        atexit.register(server.stop)
        atexit.register(lambda: run(stack.aclose()))
    return _stores[0]


async def _check_variance(case: tuple[list[float], bool]) -> None:
    """A group is replaced if its rewards are equal but for rounding, else trained."""
    rewards, are_equal = case
    group = await other_run(await _store(), zero_variance_reward="reward", group_size=len(rewards))
    await group.submit("a", num_samples=len(rewards))
    for reward in rewards:
        await group.play(outcome=rewarded(reward))
    counts = await group.store.runs.run_counts(group.run_id)
    assert (counts.num_discarded_groups, counts.num_ready_groups) == (are_equal, not are_equal)


def _check_file(name: str) -> None:
    """A process of ours starts beside a file of the user's with this name, and does not run it."""
    with tempfile.TemporaryDirectory(prefix="seamflow-field-project-") as folder:
        Path(folder, f"{name}.py").write_text(_SHOUT)
        done = subprocess.run(
            [sys.executable, "-m", "services.weights", "--help"],
            cwd=folder,
            env=child_environment({"SEAMFLOW_USER_FOLDER": folder}),
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


@strategies.composite
def _rewards(draw: strategies.DrawFn) -> tuple[list[float], bool]:
    """One number in float64 and float32 and as sums, maybe beside one that is another."""
    parts = draw(strategies.lists(strategies.integers(-40, 40), min_size=2, max_size=4))
    tenths = [part / 10 for part in parts]
    exact, number = sum(parts) / 10, sum(tenths)
    rewards = [exact, number, sum(reversed(tenths))]
    other = draw(strategies.sampled_from([0.0, 0.001, -1.0]))
    return [*rewards, exact + other], other == 0.0


KINDS = (
    Kind(
        name="equal rewards",
        check=_check_variance,
        examples=[
            ([0.1 + 0.2, 0.3], True),
            ([0.99999994, 1.0], True),
            ([0.0, 1e-6], False),
            ([1.0, 0.999], False),
        ],
        generated=_rewards(),
        short=20,
        long=500,
    ),
    Kind(
        name="files of a project",
        check=_check_file,
        examples=["trainer", "services"],
        generated=strategies.sampled_from(_NAMES),
        short=2,
        long=60,
    ),
)
