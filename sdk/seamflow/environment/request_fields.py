"""Fields of requests to an environment server: their checks, and messages as dicts."""

from __future__ import annotations

import json
import re

from seamflow.client.turn import Task
from seamflow.common.v1 import tokens_pb2
from seamflow.environment.call_error import invalid_field
from seamflow.trajectory.v1 import trajectory_pb2

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,199}")


def check_name(field: str, name: str) -> None:
    """Raise `CallError` INVALID_FIELD unless `name` is one that a client may make."""
    if not _NAME.fullmatch(name):
        cure = "1 to 200 characters of A-Z a-z 0-9 . _ ~ : @ + = / -, the first a letter or digit"
        raise invalid_field(field, name, cure)


def to_task(field: str, task: trajectory_pb2.Task) -> Task:
    """The task for the user's code; `CallError` INVALID_FIELD names what is wrong."""
    try:
        payload = json.loads(task.payload_json or "{}")
    except ValueError as error:
        raise invalid_field(
            f"{field}.payload_json", task.payload_json, f"send a JSON object ({error})"
        ) from error
    if not isinstance(payload, dict):
        raise invalid_field(f"{field}.payload_json", task.payload_json, "send a JSON object")
    train = task.purpose != tokens_pb2.PURPOSE_EVAL
    return Task(task_id=task.task_id, payload=payload, train=train)
