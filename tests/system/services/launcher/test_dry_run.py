"""`seamflow train --dry-run` as a process: mistakes alone, or the plan when everything is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suites.models.kinds import WINDOWED, Kind

ROOT = Path(__file__).parents[4]
LONG = pytest.mark.long(short="tests/system/services/launcher/test_dry_run.py")
RUN = """
[launcher]
name = "run"
prepare = "my_model"
model = "{run}/prepared/model"
tasks = "tasks.jsonl"
agent = "my_agent:Agent"

[dataloader]
epochs = 0

[trainer]
num_steps = 3
"""
AGENT = "class Agent:\n    async def run(self, task, rollout):\n        return 1.0\n"
TOOL_LOOP = """
[launcher]
name = "run"
prepare = "my_model"
model = "{run}/prepared/model"
tasks = "tasks.jsonl"
environment = "tool_loop"

[tool_loop]
prompt = "{{ question }}"

[tool_loop.rewards]
good = "my_agent:score"

[trainer]
num_steps = 3
"""


def dry_run(folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Of a file with `text` in a project of its own."""
    (folder / "run.toml").write_text(text)
    (folder / "tasks.jsonl").write_text('{"task_id": "1", "payload": {"question": "a"}}\n')
    if not (folder / "my_agent.py").exists():
        (folder / "my_agent.py").write_text(AGENT)
    return subprocess.run(
        [sys.executable, "-m", "services.launcher", "--config", "run.toml", "--dry-run", *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'sdk'}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plan_comes_when_everything_is_right(tmp_path: Path) -> None:
    """All processes, then the amount of tasks; nothing is left behind."""
    done = dry_run(tmp_path, RUN, "--set", "launcher.group_size=2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert any(line.startswith("trainer ") for line in lines)
    assert lines[-2:] == [
        "1 tasks, repeated, for 3 steps of 16 groups of 2 rollouts",
        "nothing was started",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "code", "mistake"),
    [
        (RUN.replace("num_steps", "nmu_steps"), 78, "unknown key; did you mean num_steps?"),
        (RUN.replace("my_agent:Agent", "my_agent:Agnet"), 78, "has no attribute 'Agnet'"),
        (
            TOOL_LOOP.replace("{{ question }}", "{hint}").replace("my_agent:score", "exact"),
            78,
            "tasks.jsonl line 1 has no 'hint' (it has question)",
        ),
        pytest.param(TOOL_LOOP, 78, "score", marks=LONG),
        pytest.param(
            RUN + "[agent_runner]\nconcurrency = 3\n",
            78,
            "[agent_runner], which no process reads",
            marks=LONG,
        ),
    ],
)
def test_a_mistake_is_told_alone(tmp_path: Path, text: str, code: int, mistake: str) -> None:
    """In one line, without the commands of a plan that will not be started."""
    done = dry_run(tmp_path, text)
    assert done.returncode == code
    assert mistake in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_code_of_the_user_cannot_end_the_check(tmp_path: Path) -> None:
    """It is loaded in a process of its own."""
    (tmp_path / "my_agent.py").write_text("import os\nos._exit(3)\n")
    done = dry_run(tmp_path, RUN)
    assert done.returncode == 78
    assert "ended with code 3" in done.stderr


MODELS = """
[launcher]
name = "run"
model = "policy"
tasks = "tasks.jsonl"
agent = "my_agent:Agent"
{more}

[dataloader]
epochs = 0

[trainer]
num_steps = 3
"""


@pytest.mark.parametrize(
    ("policy", "more", "named"),
    [
        ("llama", "", ""),
        ("rwkv", "", "the torch engine cannot compute model_type rwkv exactly"),
        ("doge", "", "model_type doge computes a row otherwise when others are computed beside it"),
        ("llama", 'reference = "other"', "has another tokenizer: 'A' is id"),
    ],
)
def test_models_that_are_not_computed_exactly_are_refused(
    tmp_path: Path, policy: str, more: str, named: str
) -> None:
    """By small models of the same architecture, and by their token ids; the control is a llama."""
    Kind(policy, WINDOWED.get(policy, {})).save(tmp_path / "policy")
    file = Kind("llama").save(tmp_path / "other") / "tokenizer.json"
    ids = json.loads(file.read_text())
    words = ids["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    file.write_text(json.dumps(ids))
    found = dry_run(tmp_path, MODELS.replace("{more}", more))
    assert named in found.stderr
    assert found.returncode == (78 if named else 0), found.stderr
