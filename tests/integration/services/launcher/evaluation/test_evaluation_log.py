"""The tasks on which an environment is evaluated."""

from __future__ import annotations

import asyncio

import pytest
from seamflow.client.task import Task

from services.chassis.errors import ConfigError
from services.launcher.evaluation.heldout_tasks import environment_tasks
from services.lib.tasks.task_rows import TaskRow
from tests.lib.dataloader.support import environment_server
from tests.lib.launcher.support import make_config


def test_the_last_tasks_of_an_environment_are_evaluated() -> None:
    """Those that the dataloader leaves out; too few are an error."""

    class Three:
        tasks = tuple({"number": index} for index in range(3))

        def reset(self, task: Task, seed: int) -> str:
            return task.task_id

        def step(self, message: object) -> object: ...

    def found(number: int) -> list[TaskRow]:
        fields = {"agent": None, "tasks": None, "environment": address}
        return asyncio.run(environment_tasks(make_config(**fields, num_heldout=number), address))

    with environment_server(Three) as address:
        assert found(2) == [TaskRow("1", '{"number": 1}'), TaskRow("2", '{"number": 2}')]
        with pytest.raises(ConfigError, match="num_heldout is 3"):
            found(3)
