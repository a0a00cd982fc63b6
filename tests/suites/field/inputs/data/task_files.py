"""Tasks as people have them: the same from training, held-out tasks and a dry run, or one line."""

from __future__ import annotations

import atexit
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
from hypothesis import strategies
from pyarrow import parquet

from services.chassis.errors import ConfigError, ServiceError
from services.dataloader.check_tasks import check_tasks
from services.dataloader.config import DataloaderConfig
from services.dataloader.loader import make_task
from services.evaluator.heldout_tasks import read_tasks
from services.lib.tasks.sources import open_source
from tests.suites.field.kind import Kind
from trajectory_manager.api.validation import json_object
from trajectory_manager.api.validation import name as store_name

NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of tasks, and what is right for it."""

    content: bytes | list[dict[str, Any]] | pyarrow.Table
    """Of a JSONL file, or the rows of a Parquet file."""
    tasks: Mapping[str, Any] = field(default_factory=dict)
    """Name -> payload."""
    error: tuple[str, ...] = ()
    """Parts of the one line that refuses it; empty: it is accepted."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of [dataloader], and the same of [evaluation]."""


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="task-files-")
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def _written(file: File) -> str:
    kind = "jsonl" if isinstance(file.content, bytes) else "parquet"
    path = _folder() / f"t{next(NUMBERS)}.{kind}"
    if isinstance(file.content, bytes):
        path.write_bytes(file.content)
    else:
        rows = file.content if isinstance(file.content, list) else None
        parquet.write_table(pyarrow.Table.from_pylist(rows) if rows else file.content, path)
    return str(path)


def _trained(path: str, config: DataloaderConfig) -> dict[str, Any]:
    source = open_source(path, shuffle=False, seed=0)
    _, broken = check_tasks(config, source)
    tasks = [make_task(row, 0, config) for row in source.rows(0, 0) if row.index not in broken]
    for task in tasks:  # as the store checks it
        store_name("task_id", task.task_id)
        json_object("payload_json", task.payload_json)
    return {task.task_id.removesuffix("@0"): json.loads(task.payload_json) for task in tasks}


def _heldout(path: str, config: DataloaderConfig) -> dict[str, Any]:
    tasks = read_tasks(path, config.row_fields)
    return {task.name: json.loads(task.payload_json) for task in tasks}


def check_file(file: File) -> None:
    """Both readers give the same tasks, or refuse the file with one line."""
    path = _written(file)
    config = DataloaderConfig(run_id="run", tasks=path, **file.settings)
    try:
        for read in (_trained, _heldout):
            _check_reader(file, lambda read=read: read(path, config))  # type: ignore[misc]
    finally:
        Path(path).unlink()


def _check_reader(file: File, read: Callable[[], dict[str, Any]]) -> None:
    try:
        found = read()
    except ConfigError as error:
        text = str(error)
        missing = [part for part in file.error if part not in text]
        if missing or not file.error or "\n" in text:
            raise AssertionError(f"the message {text!r} lacks {missing}") from error
        return
    if file.error or found != dict(file.tasks) or list(found) != list(file.tasks):
        raise AssertionError(f"read {found!r}")


def lines(*rows: Any) -> bytes:
    """JSON Lines as most programs write them, with characters as they are."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def row(name: object, **payload: Any) -> dict[str, Any]:
    """A task in the full form."""
    return {"task_id": name, "payload": payload}


FLOAT = pyarrow.float32()
MAP = pyarrow.map_(pyarrow.string(), FLOAT)


def table(row: dict[str, Any], kinds: dict[str, pyarrow.DataType]) -> pyarrow.Table:
    """A Parquet file of one task, whose payload has these types."""
    columns = {"task_id": pyarrow.string(), "payload": pyarrow.struct([*kinds.items()])}
    return pyarrow.Table.from_pylist([row], pyarrow.schema([*columns.items()]))


SEPARATORS = "1\u2028\u2029\x85\x0b\x0c2"
FLAT = {"question": "1+1", "answer": 2}
BY_ID = {"task_id_field": "id"}
SEARCH = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Who?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "Bob"]}},
}
TARGET = "{reward_model[ground_truth][target]}"
TEMPLATE = {"task_id_field": "", "payload": {"question": "Say {q}", "answer": "{a}"}}


def filled(value: Any) -> dict[str, Any]:
    """What the template makes of the answer `value`."""
    return {"question": "Say it", "answer": value}


EXAMPLES = [
    File(content=lines(row("a", x=1), row("a", x=2)), error=("line 1", "line 2", "'a'")),
    File(content=lines(row("a", x=1), row("a", x=1)), error=("line 1", "line 2", "'a'")),
    File(content=lines(row(7), row("b"), row("7")), error=("line 1", "line 3", "'7'")),
    File(content=[row(7, x=1), row(7, x=1)], error=("row 1", "row 2", "'7'")),
    File(content=lines(row("a", x=SEPARATORS)), tasks={"a": {"x": SEPARATORS}}),
    File(content=b"\xef\xbb\xbf" + lines(row("a", x=1)), tasks={"a": {"x": 1}}),
    File(content=b"\xef\xbb\xbf\n" + lines(row("a", x=1)), tasks={"a": {"x": 1}}),
    File(content=lines(row("a", x=1)).replace(b"\n", b"\r\n"), tasks={"a": {"x": 1}}),
    File(content=lines(row("a"), row(None)), error=("line 2", "None")),
    File(content=lines(row("a"), row(True)), error=("line 2", "True")),
    File(content=b'{"task_id": 1, "payload": {"x": NaN}}\n', error=("line 1", "NaN")),
    File(content=b'{"task_id": 1, "payload": {"x": -Infinity}}\n', error=("line 1", "-Infinity")),
    File(content=b'{"task_id": 1, "payload": {"x": 1e999}}\n', error=("line 1", "JSON")),
    File(content=[row("a", x=float("nan"))], error=("row 1", "JSON")),
    File(content=b'{"task_id": 1, "payload": {"x": "\\ud83d"}}\n', error=("line 1", "surrogate")),
    File(content=b'{"task_id": "\\ud83d", "payload": {"x": 1}}\n', error=("line 1", "surrogate")),
    File(content=b'\n{"x": 1}\n{"x": "\xff"}\n', error=("line 3", "UTF-8")),
    File(content=b"[" * 100_000 + b"\n", error=("line 1",)),
    File(content=lines(FLAT), tasks={"0": FLAT}),
    File(content=lines({"task_id": 5, "q": 1}), tasks={"5": {"task_id": 5, "q": 1}}),
    File(content=[FLAT], tasks={"0": FLAT}),
    File(content=lines({"id": "x", "q": 1}), tasks={"x": {"id": "x", "q": 1}}, settings=BY_ID),
    File(content=lines({"q": 1}), error=("line 1", "'id'"), settings=BY_ID),
    File(content=lines({"task_id": 1, "paylod": {"x": 1}}), error=("line 1", "'payload'")),
    File(content=lines({"task_id": 1, "payload": '{"x": 1}'}), tasks={"1": {"x": 1}}),
    File(content=lines({"task_id": 1, "payload": "text"}), error=("line 1", "'payload'")),
    File(
        content=lines(SEARCH),
        tasks={"0": {"answer": ["Ann", "Bob"]}},
        settings={"task_id_field": "", "payload": {"answer": TARGET}},
    ),
    File(
        content=[SEARCH],
        tasks={"0": {"answer": ["Ann", "Bob"]}},
        settings={"task_id_field": "", "payload": {"answer": TARGET}},
    ),
    File(
        content=lines({"reward_model": {"ground_truth": {"target": None}}}),
        error=("line 1", "null", "reward_model[ground_truth][target]"),
        settings={"task_id_field": "", "payload": {"answer": TARGET}},
    ),
    File(
        content=lines({"reward_model": {"ground_truth": 4}}),
        error=("line 1", "reward_model"),
        settings={"task_id_field": "", "payload": {"answer": TARGET}},
    ),
    File(content=lines({"q": "it", "a": None}), error=("line 1", "null", "'a'"), settings=TEMPLATE),
    File(content=lines({"q": None, "a": 1}), error=("line 1", "null", "'q'"), settings=TEMPLATE),
    File(content=lines({"q": "it", "a": 4}), tasks={"0": filled(4)}, settings=TEMPLATE),
    File(content=lines(row("What is 2+2?")), error=("line 1", "'What is 2+2?'", "task_id_field")),
    File(content=lines(row("数学-1")), error=("line 1", "数学-1")),
    File(content=lines(row("a" * 201)), error=("line 1", "201 characters")),
    File(content=lines(row("a" * 199)), error=("line 1", "199 characters")),
    File(content=lines(row("a" * 150)), tasks={"a" * 150: {}}),
    File(content=lines(row("a", x="b" * (1 << 20))), error=("line 1", "bytes")),
    File(content=lines(row("a", x="é" * (1 << 19))), error=("line 1", "bytes")),
    File(content=lines(row("a"), 1, row("c d")), error=("2 of 3 rows", "line 2", "line 3")),
    File(
        content=lines(row("a"), 1, row("b"), row("c d"), row("a", x=1)),
        tasks={"a": {}, "b": {}},
        settings={"broken_rows": "skip"},
    ),
    File(content=lines(1), error=("no row is a task", "line 1"), settings={"broken_rows": "skip"}),
    File(content=table(row("a", f=0.1), {"f": FLOAT}), tasks={"a": {"f": 0.1}}),
    File(content=table(row("a", m={"k": 0.3}), {"m": MAP}), tasks={"a": {"m": {"k": 0.3}}}),
    File(
        content=[row("a", u={"x": 1}), row("b", u={"y": [{"z": 2}, {"w": 3}]})],
        tasks={"a": {"u": {"x": 1}}, "b": {"u": {"y": [{"z": 2}, {"w": 3}]}}},
    ),
]  # fmt: skip

TEXTS = strategies.text(strategies.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = TEXTS | strategies.integers(-(2**40), 2**40) | strategies.booleans()
VALUES = strategies.recursive(
    SCALARS | strategies.none() | strategies.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        strategies.lists(inner, max_size=3) | strategies.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = (
    strategies.integers(0, 99)
    | strategies.integers(0, 99).map(str)
    | strategies.from_regex(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,20}", fullmatch=True)
)
ANY_NAMES = NAMES | TEXTS.filter(bool)


def _is_taken(name: str) -> bool:
    """Whether the store takes it as a task's name, with an epoch."""
    try:
        return bool(store_name("task_id", f"{name}@0"))
    except ServiceError:
        return False


@strategies.composite
def full_rows(draw: Any) -> File:
    """Rows in the full form, some with equal ids."""
    each_name = draw(strategies.sampled_from([NAMES, ANY_NAMES]))
    names = draw(strategies.lists(each_name, min_size=1, max_size=6))
    payloads = [draw(strategies.dictionaries(TEXTS, VALUES, max_size=3)) for _ in names]
    rows = [{"task_id": n, "payload": p} for n, p in zip(names, payloads, strict=True)]
    text = "".join(
        draw(strategies.sampled_from(["", "\n", " \r\n"]))
        + json.dumps(each, ensure_ascii=draw(strategies.booleans()))
        + draw(strategies.sampled_from(["\n", "\r\n"]))
        for each in rows
    )
    content = draw(strategies.sampled_from([b"", b"\xef\xbb\xbf"])) + text.encode()
    texts = [str(name) for name in names]
    twice = len({*texts}) < len(texts)
    if twice or not all(map(_is_taken, texts)):
        return File(content=content, error=("line ",))
    return File(content=content, tasks={str(n): p for n, p in zip(names, payloads, strict=True)})


@strategies.composite
def template_rows(draw: Any) -> File:
    """Rows of which a template takes a field alone."""
    values = draw(strategies.lists(VALUES, min_size=1, max_size=4))
    rows = [{"q": "it", "a": value} for value in values]
    if None in [each for each in values if each is None]:
        return File(content=lines(*rows), error=("null", "'a'"), settings=TEMPLATE)
    tasks = {str(i): filled(value) for i, value in enumerate(values)}
    return File(content=lines(*rows), tasks=tasks, settings=TEMPLATE)


@strategies.composite
def flat_rows(draw: Any) -> File:
    """Rows without id and payload, in JSONL or Parquet."""
    names = draw(strategies.sampled_from([("question", "answer"), ("prompt", "gold", "id")]))
    rows = draw(
        strategies.lists(
            strategies.fixed_dictionaries(dict.fromkeys(names, TEXTS)), min_size=1, max_size=5
        )
    )
    content = draw(strategies.sampled_from([lines(*rows), rows]))
    return File(content=content, tasks={str(i): each for i, each in enumerate(rows)})


@strategies.composite
def broken_text(draw: Any) -> File:
    """A row with half a character, anywhere in a text, among good ones."""
    good = draw(strategies.integers(0, 3))
    half = "\\u" + draw(strategies.integers(0xD800, 0xDFFF).map("{:04x}".format))
    text = draw(strategies.from_regex(r"[a-z]{0,5}", fullmatch=True)) + half + " end"
    where = draw(strategies.sampled_from(['{"payload": {"x": "%s"}}', '{"payload": {"%s": 1}}']))
    content = lines(*[row(f"t{i}") for i in range(good)]) + (where % text).encode() + b"\n"
    return File(content=content, error=(f"line {good + 1}", "surrogate"))


def flat_tasks(seed: int, epoch: int) -> list[dict[str, Any]]:
    """Raw rows of a function."""
    return [FLAT, {**FLAT, "answer": [2, "two"]}]


def check_source(source: str) -> None:
    """Training and evaluation take it, with a payload template, and give the same tasks."""
    if source.startswith("hf://"):
        source = source.format(folder=_dataset())
    settings: dict[str, Any] = {"payload": {"q": "What is {question}?", "a": "{answer}"}}
    config = DataloaderConfig(run_id="run", tasks=source, **settings)
    right: dict[str, dict[str, Any]] = {
        "0": {"q": "What is 1+1?", "a": 2},
        "1": {"q": "What is 1+1?", "a": [2, "two"]},
    }
    if source.startswith("hf://"):  # whose columns have one type
        right = {"0": right["0"], "1": {**right["1"], "a": 3}}
    for found in (_trained(source, config), _heldout(source, config)):
        if found != right:
            raise AssertionError(f"read {found!r}")


@cache
def _dataset() -> Path:
    folder = _folder() / "dataset"
    folder.mkdir()
    (folder / "test.jsonl").write_bytes(lines(FLAT, {**FLAT, "answer": 3}))
    return folder


KINDS = (
    Kind(
        name="task sources",
        check=check_source,
        examples=[
            "tests.suites.field.inputs.data.task_files:flat_tasks",
            "hf://{folder}?split=test",
        ],
    ),
    Kind(
        name="task files",
        check=check_file,
        examples=EXAMPLES,
        generated=strategies.one_of(full_rows(), template_rows(), flat_rows(), broken_text()),
        short=60,
    ),
)
