"""Tasks of an environment, from its server."""

from __future__ import annotations

import pytest
from seamflow.client.turn import Task

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.lib.tasks.sources import open_source
from tests.lib.dataloader.support import environment_server, numbered
from tests.unit.services.dataloader.test_sources import ids


def test_tasks_of_an_environment_are_read_from_its_server() -> None:
    """All pages, in the server's order; a class without tasks, or no server, is an error."""

    class Listed:
        tasks = tuple(row["payload"] for row in numbered(1200))

        def reset(self, task: Task, seed: int) -> str:
            return task.task_id

        def step(self, message: object) -> object: ...

    class Bare(Listed):
        tasks = ()

    with environment_server(Listed) as address:
        source = open_source(f"environment://{address}", shuffle=False, seed=0)
        assert ids(source) == [str(index) for index in range(1200)]
    with environment_server(Bare) as address, pytest.raises(ConfigError, match="none of its own"):
        open_source(f"environment://{address}", shuffle=False, seed=0)
    with pytest.raises(DependencyUnavailable, match=r"environment 127\.0\.0\.1:1"):
        open_source("environment://127.0.0.1:1", shuffle=False, seed=0, start_seconds=0.3)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_last_tasks_of_an_environment_are_held_out(shuffle: bool) -> None:
    """The same ones in any order; control: with none held out all are there."""

    class Five:
        tasks = tuple({"number": index} for index in range(5))

        def reset(self, task: Task, seed: int) -> str:
            return task.task_id

        def step(self, message: object) -> object: ...

    with environment_server(Five) as address:
        name = f"environment://{address}"
        for number, expected in ((0, "01234"), (2, "012"), (4, "0")):
            source = open_source(name, shuffle=shuffle, seed=0, num_heldout=number)
            assert sorted(ids(source)) == list(expected)
        with pytest.raises(ConfigError, match=r"num_heldout is 5, and .* has 5 .*: give at most 4"):
            open_source(name, shuffle=shuffle, seed=0, num_heldout=5)
