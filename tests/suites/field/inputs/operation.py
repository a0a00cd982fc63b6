"""What a run meets beside its data: rewards that differ by rounding, files, folders, stores."""

from __future__ import annotations

import atexit
import codecs
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from unittest.mock import patch

from hypothesis import strategies
from redis.asyncio import Redis

from rollout.gateway.dispatch.policies import BUILT_IN as DISPATCH
from scheduler.policy.allocation_policy import POLICIES
from services.chassis import plugins
from services.chassis.config.load import load
from services.chassis.errors import ConfigError
from services.launcher.checks.run_settings import process_setting
from services.launcher.config import LauncherConfig
from services.launcher.supervisor import child_environment
from services.lib.redis_binary import socket_folder
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.support import other_run, rewarded
from tests.suites.field.event_loop import run
from tests.suites.field.kind import Kind
from trainer.config.optimization import ALGORITHMS
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.connect import Store, redis_store

_SHOUT = "import sys; sys.stderr.write('the file of the user ran\\n'); sys.exit(3)\n"
_NAMES = sorted(
    {"services", "trainer", "scheduler", "rollout", "trajectory_manager", "tools", "seamflow"}
    | {name for name in sys.stdlib_module_names if not name.startswith("_")}
    | {"redis", "torch", "numpy", "grpc", "pydantic", "structlog", "google"}
)

_TOML = (
    '[launcher]\nname = "run"\nmodel = "m"\ntasks = "t"\nagent = "a:B"\n[trainer]\nnum_steps = 7'
)
_BUILT_IN = {"scheduler": POLICIES, "rollout": DISPATCH, "trainer": ALGORITHMS}
"""Names of built-ins, by the package that they are in."""

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


async def _check_managed(case: tuple[str, Durability, bool]) -> None:
    """A Redis whose user lacks a command: it serves, or one line names the command."""
    denied, durability, is_served = case
    server = RedisServer(Path(tempfile.mkdtemp(prefix="seamflow-field-managed-")))
    server.start(appendfsync="always")
    try:
        async with Redis(port=server.port) as client:
            await client.acl_setuser(
                "managed", True, passwords=["+word"], keys=["*"], channels=["*"],
                categories=["+@all"], commands=[f"-{denied}"],
            )  # fmt: skip
        url = server.url.replace("redis://", "redis://managed:word@")
        try:
            async with redis_store(url, durability, 5.0):
                assert is_served
        except ConfigError as error:
            assert not is_served and denied.partition("|")[0].upper() in str(error), str(error)
    finally:
        server.stop()


def _check_toml(text: str) -> None:
    """A settings file is read alike with a byte order mark and without."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for mark in (b"", codecs.BOM_UTF8):
            file = Path(folder, "train.toml")
            file.write_bytes(mark + text.encode())
            config = load(LauncherConfig, "launcher", ["--config", str(file)])
            found.append((config, process_setting(config, file, "trainer.num_steps")))
    assert found[0] == found[1]


def _check_temporary(length: int) -> None:
    """A socket can be made however long the path of the folder for temporary files is."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "t" * max(length - len(folder), 1))
        place.mkdir()
        long = patch.object(tempfile, "tempdir", str(place))
        with long, socket_folder() as short, socket.socket(socket.AF_UNIX) as made:
            made.bind(f"{short}/redis.sock")


def _check_plugin(package: str) -> None:
    """A built-in is ours in a folder that has a package of its name, such as a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, package).mkdir()
        Path(folder, package, "__init__.py").write_text(_SHOUT)
        with patch.dict(os.environ, {"SEAMFLOW_USER_FOLDER": folder}):
            for name in _BUILT_IN[package]:
                with suppress(TypeError):  # it takes arguments, so it was found
                    plugins.make("field", name, _BUILT_IN[package])


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
        name="managed stores",
        check=_check_managed,
        examples=[
            ("config", Durability.FAST, True),
            ("config", Durability.DURABLE, False),
            ("config|get", Durability.FAST, True),
            ("config|get", Durability.DURABLE, False),
            ("info", Durability.FAST, False),
            ("debug", Durability.DURABLE, True),
        ],
    ),
    Kind(
        name="byte order marks",
        check=_check_toml,
        examples=[_TOML, _TOML.replace("\n", "\r\n"), f"# é\n{_TOML}"],
    ),
    Kind(
        name="folders for temporary files",
        check=_check_temporary,
        examples=[20, 60, 61, 93, 107, 200],
        generated=strategies.integers(20, 250),
        long=100,
    ),
    Kind(
        name="packages of a checkout",
        check=_check_plugin,
        examples=[*_BUILT_IN],
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
