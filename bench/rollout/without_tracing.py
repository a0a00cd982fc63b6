"""`python -m bench.rollout.without_tracing SIDE MODULE`: a service of a side of `tracing.py`.

Side "without" has none of the tracing's code: calls keep the ids of their logs, as before there
were traces, and nothing else. The other sides start in the same way, as what a process has imported
changes its garbage collection.
"""

from __future__ import annotations

import runpy
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from seamflow import channel, trace_context

from rollout.gateway.record import recorder
from services.chassis.rpc import tracing

_NOTHING = nullcontext()


def main() -> None:
    """Take it out, if the side is that one, then run the module."""
    side, module = sys.argv.pop(1), sys.argv.pop(1)
    if side == "without":
        _take_out()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _take_out() -> None:
    vars(tracing).update(begin=_begin, span=_no_span, rollout_span=_no_span, traceparent=_none)
    vars(trace_context)["of_rollout"] = lambda run_id, rollout_id: ""
    vars(recorder)["_span"] = lambda message: _NOTHING
    channel._Channel._with_ours = _with_ours  # type: ignore[method-assign]


def _begin(metadata: Mapping[str, Any], method: str = "", parent: str = "") -> tracing.Trace:
    found = trace_context.ids(metadata.get(trace_context.HEADER, ""))
    given = metadata.get("x-request-id", "")
    trace = tracing.Trace(
        request_id=given if tracing._REQUEST_ID.fullmatch(given) else secrets.token_hex(8),
        trace_id=found[0] if found else secrets.token_hex(16),
        span_id=secrets.token_hex(8),
    )
    trace_context.current.set(f"00-{trace.trace_id}-{trace.span_id}-01")
    return trace


def _no_span(*args: Any, **attributes: Any) -> AbstractContextManager[None]:
    return _NOTHING


def _none() -> None:
    return None


def _with_ours(self: Any, given: Sequence[tuple[str, str | bytes]]) -> channel.Metadata:
    ours = () if any(key == "authorization" for key, _ in given) else self._shown()
    return (*given, *ours)


if __name__ == "__main__":
    main()
