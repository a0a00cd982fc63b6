"""Files of transcripts: JSON lines, or Parquet where the name ends in .parquet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seamflow.cli.export_run.export import load_arrow
from seamflow.inspect.endpoints import UsageError

_ROWS = 1000
"""Rows of a row group of Parquet, which are held in memory."""

Add = Callable[[Mapping[str, Any]], None]
"""Appends a transcript."""


@contextmanager
def opened(file: Path) -> Iterator[Add]:
    """What appends rows to `file`, which is replaced at the end of the block, if that succeeds.

    Raises:
        UsageError: pyarrow is missing for a Parquet file, or the file cannot be written.
    """
    kind = _parquet if file.suffix == ".parquet" else _json_lines
    partial = file.with_name(f".{file.name}.partial")
    try:
        with kind(partial) as add:
            yield add
        partial.replace(file)
    except OSError as error:
        raise UsageError(f"--out {str(file)!r} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _json_lines(file: Path) -> Iterator[Add]:
    with file.open("w", encoding="utf-8") as out:
        yield lambda row: print(json.dumps(row, ensure_ascii=False), file=out)


@contextmanager
def _parquet(file: Path) -> Iterator[Add]:
    arrow = load_arrow()
    schema, rows = _schema(arrow), list[Mapping[str, Any]]()
    with arrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
            rows.clear()

        def add(row: Mapping[str, Any]) -> None:
            rows.append(_entries(row))
            if len(rows) == _ROWS:
                flush()

        yield add
        flush()


def _entries(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its maps as lists of entries, as pyarrow takes them."""
    turns = [{**turn, "rewards": list(turn["rewards"].items())} for turn in row["turns"]]
    maps = {name: list(row[name].items()) for name in ("rewards", "labels")}
    return {**row, **maps, "turns": turns}


def _schema(arrow: Any) -> Any:
    text, versions = arrow.string(), arrow.list_(arrow.int64())
    rewards = arrow.map_(text, arrow.float64())
    turn = {
        **dict.fromkeys(("turn_id", "continues_turn_id", "prompt", "answer"), text),
        "finish_reason": text,
        "weight_versions": versions,
        "rewards": rewards,
    }
    fields = {
        **dict.fromkeys(("task_id", "rollout_id", "purpose", "state"), text),
        "weight_versions": versions,
        "rewards": rewards,
        "policy_failure": text,
        "truncated": arrow.bool_(),
        "failure": arrow.struct({"class": text, "message": text}),
        "labels": arrow.map_(text, text),
        "turns": arrow.list_(arrow.struct(turn)),
    }
    return arrow.schema(fields)
