"""Every kind of input, by the module that has it."""

from __future__ import annotations

from importlib import import_module

from tests.suites.field.kind import Kind

AREAS: tuple[str, ...] = (
    "agent_calls",
    "agent_requests",
    "answers",
    "data.data_sets",
    "data.task_files",
    "data.tracking",
    "end_ids",
    "environments",
    "expected_answers",
    "forced_calls",
    "math_answers",
    "model_folders",
    "operation",
    "rewards",
    "training.checkpoints",
    "training.credit",
    "training.lora",
    "training.model_kinds",
    "training.rope",
    "training.schedules",
)
"""Modules of `inputs` with a tuple `KINDS`."""


def kinds_of(area: str) -> tuple[Kind, ...]:
    """The kinds of an area; raises `ImportError` for an unknown one."""
    kinds: tuple[Kind, ...] = import_module(f"tests.suites.field.inputs.{area}").KINDS
    return kinds
