"""`python -m seamflow.environment`: serves, and refuses what cannot work with one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from seamflow.environment import EnvironmentClient, EnvironmentServerConfig, Task, serving
from seamflow.environment.environment_arguments import main

from tests.lib.sdk.environment.environments import NOT_AN_ENVIRONMENT, Guess

ROOT = Path(__file__).parents[4]
COMMAND = [sys.executable, "-m", "seamflow.environment"]
HERE = "tests.lib.sdk.environment.environments"
GREETS = ("--environment", f"{HERE}:Greets", "--arguments")


async def test_the_module_serves_until_sigterm() -> None:
    """It announces its port, and ends cleanly."""
    process = subprocess.Popen(
        [*COMMAND, "--environment", f"{HERE}:Guess"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SEAMFLOW_ENVIRONMENT_MAX_EPISODES": "3"},
    )
    assert process.stdout is not None
    with process, process.stdout:
        port = json.loads(process.stdout.readline())["port"]
        async with EnvironmentClient(f"127.0.0.1:{port}") as client:
            assert (await client.describe()).max_episodes == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("by_flag", [True, False])
async def test_the_class_gets_its_arguments(by_flag: bool) -> None:
    """As a flag or a variable; what its objects declare is what the server declares."""
    given = '{"greeting": "hello", "num_tasks": 3}'
    flags, variables = ["--arguments", given], {"SEAMFLOW_ENVIRONMENT_ARGUMENTS": given}
    process = subprocess.Popen(
        [*COMMAND, "--environment", f"{HERE}:Greets", *(flags if by_flag else [])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **({} if by_flag else variables)},
    )
    assert process.stdout is not None
    with process, process.stdout:
        port = json.loads(process.stdout.readline())["port"]
        async with EnvironmentClient(f"127.0.0.1:{port}") as client:
            described = await client.describe()
            assert (described.name, described.num_tasks) == ("Greets", 3)
            async with await client.reset(Task(task_id="t", payload={})) as episode:
                assert episode.observation.messages == [{"role": "user", "content": "hello"}]
        process.terminate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "neither environment nor reward is given"),
        (["--environment", "nothing"], "environment is 'nothing': write it as"),
        (["--environment", "no_such_module:X"], "is its folder on PYTHONPATH?"),
        (["--environment", f"{HERE}:Missing"], "Missing"),
        (["--environment", f"{HERE}:NOT_AN_ENVIRONMENT"], "give the class itself"),
        (["--environment", f"{HERE}:Transcriptless"], "Transcriptless"),
        (["--reward", f"{HERE}:NOT_AN_ENVIRONMENT"], "give a function reward(task, transcript)"),
        (["--environment", f"{HERE}:Guess", "--host", "0.0.0.0"], "give a token"),
        (["--environment", f"{HERE}:Guess", "--max-episodes", "0"], "must be at least 1"),
        (["--environment", f"{HERE}:Guess", "--tls-key-file", "k"], "belong together"),
        ([*GREETS, "{"], "--arguments is '{': give a JSON object of keyword arguments, such as"),
        ([*GREETS, "[1]"], "--arguments is '[1]': give a JSON object"),
        ([*GREETS, "{}"], "does not take them: missing a required argument: 'greeting'"),
        ([*GREETS, '{"greetings": 1}'], '{"greetings": 1}: Greets(greeting: '),
        (["--reward", f"{HERE}:long_answer", "--arguments", "{}"], "give --environment"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 78 and one line."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n"), words in error) == (78, 1, True), error


class Stepless:
    """Lacks `step`."""

    def reset(self) -> None:
        """Nothing."""


async def test_a_class_without_its_methods_is_refused() -> None:
    """The error names what to define."""
    with pytest.raises(ValueError, match=r"Stepless has no method step: define reset"):
        async with serving(Stepless):
            pass
    with pytest.raises(ValueError, match="environment is <object"):
        async with serving(NOT_AN_ENVIRONMENT):  # type: ignore[arg-type]
            pass


async def test_a_port_in_use_is_an_error() -> None:
    """It names the port and the cure."""
    async with serving(Guess) as port:
        with pytest.raises(OSError, match=f"port {port} .* choose another"):
            async with serving(Guess, EnvironmentServerConfig(port=port)):
                pass
