"""What arrives in the queue, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from seamflow.common.v1.tokens_pb2 import PURPOSE_EVAL, PURPOSE_TRAIN

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.dataloader import task_queue
from services.dataloader.config import DataloaderConfig
from services.dataloader.loader import Position, PositionFile
from tests.lib.dataloader.support import Queue, load, numbered, serving, write_jsonl


async def test_all_tasks_arrive_in_order(tmp_path: Path) -> None:
    """Ids carry the epoch, payloads are the rows' own, settings reach every task."""
    tasks, queue = write_jsonl(tmp_path / "t.jsonl", numbered(3)), Queue()
    async with serving(queue) as address:
        await load(address, tasks=tasks, epochs=2, num_samples=4)
    assert queue.ids == ["t0@0", "t1@0", "t2@0", "t0@1", "t1@1", "t2@1"]
    first = queue.tasks["t0@0"]
    assert json.loads(first.payload_json) == {"question": "0 + 1"}
    assert (first.num_samples, first.purpose) == (4, PURPOSE_TRAIN)


async def test_eval_tasks_are_marked(tmp_path: Path) -> None:
    """Held-out tasks are marked as never trained on."""
    tasks, queue = write_jsonl(tmp_path / "t.jsonl", numbered(1)), Queue()
    async with serving(queue) as address:
        await load(address, tasks=tasks, purpose="eval")
    assert queue.tasks["t0@0"].purpose == PURPOSE_EVAL


async def test_tasks_can_be_named_by_position(tmp_path: Path) -> None:
    """Tasks without a name get their row's number."""
    tasks, queue = write_jsonl(tmp_path / "t.jsonl", [{"q": 1}, {"q": 2}]), Queue()
    async with serving(queue) as address:
        await load(address, tasks=tasks, task_id_field="", payload_field="")
    assert queue.ids == ["0@0", "1@0"]
    assert json.loads(queue.tasks["1@0"].payload_json) == {"q": 2}


async def test_payloads_follow_templates(tmp_path: Path) -> None:
    """Text is filled in, a field alone keeps its type, doubled braces are braces."""
    rows = [{"name": "a", "problem": "1 + 1", "answers": [2, "two"]}]
    tasks = write_jsonl(tmp_path / "t.jsonl", rows)
    payload = {"question": "Solve {problem} as {{}}", "answer": "{answers}"}
    async with serving(queue := Queue()) as address:
        await load(address, tasks=tasks, payload=payload, task_id_field="name")
    given = json.loads(queue.tasks["a@0"].payload_json)
    assert given == {"question": "Solve 1 + 1 as {}", "answer": [2, "two"]}


@pytest.mark.parametrize(
    ("template", "cure"),
    [
        ("{porblem}", "has no field 'porblem', which payload names in '{porblem}': it has name"),
        ("so {porblem}", "has no field 'porblem'"),
        ("a {", 'write fields as "{name}"'),
        ("{name.x}", 'write fields as "{name}"'),
    ],
)
async def test_a_template_that_cannot_be_filled_is_named(
    tmp_path: Path, template: str, cure: str
) -> None:
    """The message names the row, the template and the fields that there are."""
    tasks = write_jsonl(tmp_path / "t.jsonl", [{"name": "a", "problem": "1 + 1"}])
    async with serving(Queue()) as address:
        with pytest.raises(ConfigError) as raised:
            await load(address, tasks=tasks, payload={"question": template}, task_id_field="name")
    assert cure in str(raised.value)


async def test_the_queue_is_never_overrun_nor_starved(tmp_path: Path) -> None:
    """With a slow consumer the loader fills the queue to its bound, never beyond."""
    tasks, queue = write_jsonl(tmp_path / "t.jsonl", numbered(40)), Queue(capacity=8)
    async with serving(queue) as address:
        loading = asyncio.create_task(load(address, tasks=tasks))
        await queue.until(8)
        while not loading.done():
            queue.taken = min(queue.taken + 1, len(queue.tasks))
            await asyncio.sleep(0.005)
        await loading
    assert queue.ids == [f"t{number}@0" for number in range(40)]
    assert queue.most_waiting == 8


async def test_an_outage_is_retried(tmp_path: Path) -> None:
    """While the manager's store is away nothing is lost, skipped or reordered."""
    tasks, queue = write_jsonl(tmp_path / "t.jsonl", numbered(20)), Queue(capacity=5)
    async with serving(queue) as address:
        loading = asyncio.create_task(load(address, tasks=tasks))
        await queue.until(5)
        queue.unavailable_calls, queue.capacity = 3, 100
        await loading
    assert queue.ids == [f"t{number}@0" for number in range(20)]


async def test_a_crash_anywhere_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Killed at each of several moments and resumed, the run gets every task once, in order."""
    tasks = write_jsonl(tmp_path / "t.jsonl", numbered(30))
    settings: dict[str, Any] = {
        "tasks": tasks,
        "shuffle": True,
        "epochs": 2,
        "state_file": tmp_path / "state.json",
        "resume": True,
    }
    whole, queue = Queue(), Queue(capacity=0)
    async with serving(whole) as address:
        await load(address, **{**settings, "state_file": None, "resume": False})
    async with serving(queue) as address:
        for queue.capacity in (1, 7, 13, 31, 45):
            loading = asyncio.create_task(load(address, **settings))
            await queue.until(queue.capacity)
            loading.cancel()
            await asyncio.wait([loading])
        queue.capacity = 100
        await load(address, **settings)
    assert queue.ids == whole.ids


async def test_a_crash_before_the_position_is_stored_repeats_nothing(tmp_path: Path) -> None:
    """Tasks submitted again after a crash are known by their ids."""
    tasks, state, queue = write_jsonl(tmp_path / "t.jsonl", numbered(5)), tmp_path / "s", Queue()
    async with serving(queue) as address:
        await load(address, tasks=tasks, state_file=state)
        await load(address, tasks=tasks, state_file=state)
    assert queue.ids == [f"t{number}@0" for number in range(5)]


async def test_a_finished_loader_resumes_to_its_end(tmp_path: Path) -> None:
    """Resuming after the last epoch submits nothing and ends."""
    tasks, state, queue = write_jsonl(tmp_path / "t.jsonl", numbered(2)), tmp_path / "s", Queue()
    async with serving(queue) as address:
        await load(address, tasks=tasks, state_file=state, resume=True)
        queue.unavailable_calls = 1
        await load(address, tasks=tasks, state_file=state, resume=True)
    assert queue.unavailable_calls == 1


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"purpose": "eval"}, {"run_id": "other"}, {"tasks": "edited.jsonl"}]
)
async def test_a_position_of_other_tasks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """A position is only used for the tasks, order and run it was stored for."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "edited.jsonl", numbered(3))
    settings: dict[str, Any] = {
        "tasks": write_jsonl(tmp_path / "t.jsonl", numbered(2)),
        "state_file": tmp_path / "state.json",
        "resume": True,
    }
    async with serving(Queue()) as address:
        await load(address, **settings)
        with pytest.raises(ConfigError, match="start over"):
            await load(address, **{**settings, **change})


async def test_a_position_belongs_to_the_content_of_its_tasks(tmp_path: Path) -> None:
    """Two swapped lines, which leave size and number as they are, end the resume."""
    state, rows, queue = tmp_path / "state.json", numbered(6), Queue()
    settings: dict[str, Any] = {
        "tasks": write_jsonl(tmp_path / "t.jsonl", rows),
        "state_file": state,
    }
    async with serving(queue) as address:
        await load(address, **settings)
        write_jsonl(tmp_path / "t.jsonl", [rows[1], rows[0], *rows[2:]])
        with pytest.raises(ConfigError, match="belongs to other tasks"):
            await load(address, resume=True, **settings)
        copy = write_jsonl(tmp_path / "copy.jsonl", rows)
        await load(address, resume=True, tasks=copy, state_file=state)


async def test_a_position_of_release_0_2_is_continued(tmp_path: Path) -> None:
    """It knows size and number of the tasks alone; from then on their content is kept too."""
    state, queue, tasks = tmp_path / "s", Queue(), write_jsonl(tmp_path / "t.jsonl", numbered(6))
    size = Path(tasks).stat().st_size
    source = f"run|train|jsonl:{size}:6|seed:0"
    state.write_text(json.dumps({"source": source, "epoch": 0, "place": 4}))
    async with serving(queue) as address:
        await load(address, tasks=tasks, state_file=state, resume=True)
    assert queue.ids == ["t4@0", "t5@0"]
    stored = json.loads(state.read_text())
    assert stored["source"] == source  # which release 0.2 compares, should it come back
    assert "sha256:" in stored["content"]


@pytest.mark.parametrize("stop", [1, 3, 5])
async def test_broken_rows_are_left_out_and_no_other_is(tmp_path: Path, stop: int) -> None:
    """The position counts them, so that a resume goes on at the right row."""
    rows = numbered(8)
    lines = [json.dumps(row) for row in rows]
    for place, line in ((0, "{"), (3, '{"task_id": "a b"}'), (4, "[]")):
        lines[place] = line
    path, queue = tmp_path / "t.jsonl", Queue(capacity=stop)
    path.write_text("\n".join(lines))
    settings: dict[str, Any] = {"tasks": str(path), "state_file": tmp_path / "s", "resume": True}
    async with serving(queue) as address:
        loading = asyncio.create_task(load(address, broken_rows="skip", **settings))
        await queue.until(min(stop, 5))
        loading.cancel()
        await asyncio.wait([loading])
        queue.capacity = 100
        await load(address, broken_rows="skip", **settings)
    assert queue.ids == ["t1@0", "t2@0", "t5@0", "t6@0", "t7@0"]


def test_a_damaged_position_is_an_error(tmp_path: Path) -> None:
    """Half a file, or another file, is no position."""
    path = tmp_path / "state.json"
    for text in ('{"source": "a", "ep', "[]", '{"other": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            PositionFile(path).load(Position(source="a"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"task_id": None}, "is None"),
        ({"task_id": "c", "paylod": {}}, "did you mean 'payload'"),
        ({"task_id": "a"}, "no object 'payload'"),
        ({"task_id": "a", "payload": "text"}, "no object 'payload'"),
        ({"task_id": "a", "payload": {"q": float("nan")}}, "NaN is no number of JSON"),
    ],
)
async def test_an_error_names_the_invalid_row(
    tmp_path: Path, row: dict[str, Any], expected: str
) -> None:
    """The rows before it arrive; the error names file, line and cure."""
    tasks = write_jsonl(tmp_path / "t.jsonl", [*numbered(2), row])
    async with serving(Queue()) as address:
        with pytest.raises(ConfigError, match=f"line 3.*{expected}"):
            await load(address, tasks=tasks)


async def test_duplicate_task_names_are_an_error(tmp_path: Path) -> None:
    """A name that stands for two different tasks ends the run of the loader, with name and row."""
    tasks = write_jsonl(
        tmp_path / "t.jsonl", [{"task_id": "a", "payload": {"q": n}} for n in (1, 2)]
    )
    async with serving(Queue()) as address:
        with pytest.raises(ConfigError, match=r"line [12]: .*a@0"):
            await load(address, tasks=tasks)


async def test_a_function_that_yields_no_dicts_is_named() -> None:
    """The error names the function and the position."""
    async with serving(Queue()) as address:
        with pytest.raises(ConfigError, match=r"task 1 of .*texts is a str"):
            await load(address, tasks="tests.lib.dataloader.support:texts")


async def test_a_run_that_never_appears_is_a_missing_dependency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader waits for the run to be created, but not for ever."""
    monkeypatch.setattr(task_queue, "START_SECONDS", 0.2)
    tasks = write_jsonl(tmp_path / "t.jsonl", numbered(1))
    async with serving(Queue(run_id="other")) as address:
        with pytest.raises(DependencyUnavailable, match="run"):
            await load(address, tasks=tasks)


async def test_a_run_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    """Processes may start in any order."""
    tasks, queue = write_jsonl(tmp_path / "t.jsonl", numbered(1)), Queue(run_id="later")
    async with serving(queue) as address:
        loading = asyncio.create_task(load(address, tasks=tasks))
        await asyncio.sleep(0)
        queue.run_id = "run"
        await loading
    assert queue.ids == ["t0@0"]


@pytest.mark.parametrize("change", [{"epochs": -1}, {"num_samples": -1}, {"resume": True}])
def test_settings_that_cannot_work_are_refused(change: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=next(iter(change))):
        DataloaderConfig(run_id="run", tasks="t.jsonl", **change)
