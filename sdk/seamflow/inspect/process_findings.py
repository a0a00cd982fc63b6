"""Findings of why-stuck on processes: those that stand still, do not answer, or wait themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

from seamflow.durations import seconds_of
from seamflow.errors import DeadlineError, UnavailableError
from seamflow.inspect.diagnosis import Finding, loading_addresses, still_processes
from seamflow.inspect.endpoints import SERVICES
from seamflow.inspect.findings import services_beyond
from seamflow.inspect.processes import ProcessState
from seamflow.inspect.snapshot import Snapshot

_LEAST_FREE_BYTES = 1 << 20
_WITH_MODEL = ("trainer", "gateway", "evaluator")
"""Services that take calls only once they have loaded a model or its tokenizer, or that are started
after those."""


def full_disk(snapshot: Snapshot) -> Iterator[Finding]:
    """The disk of the run's folder refuses what processes write."""
    if snapshot.free_bytes is not None and snapshot.free_bytes < _LEAST_FREE_BYTES:
        yield Finding(
            rule="disk_full",
            sentence=f"The disk is full: {snapshot.free_bytes >> 10} KiB are free where "
            f"{snapshot.logs or 'the run'} is.",
            cure="Delete old runs or checkpoints there; the run goes on by itself.",
        )


def processes_stand_still(snapshot: Snapshot) -> Iterator[Finding]:
    """Processes that run nothing, though nobody has ended them."""
    for state in snapshot.processes:
        name = _name(state)
        if state.stopped:
            ids = " ".join(map(str, state.stopped))
            yield Finding(
                rule="process_stopped",
                sentence=f"{name} runs nothing: a signal has stopped it.",
                cure=f"`kill -CONT {ids}` lets it go on.",
                subject=state.process.name,
            )
        elif state.is_silent:
            end = f"`kill -9 {state.process.pid}` ends it, and the launcher starts it again. "
            yield Finding(
                rule="process_silent",
                sentence=f"{name} accepts connections and does not answer.",
                cure=f"Its log says what it is at. If it stays so, {end}"
                if state.process.pid
                else "Its log says what it is at.",
                subject=state.process.name,
            )


def processes_wait(snapshot: Snapshot) -> Iterator[Finding]:
    """What processes say that they wait for, but for calls of those that stand still or start."""
    still = still_processes(snapshot)
    causes = {each.address for each in still} | loading_addresses(snapshot)
    causes.discard("")
    for state in snapshot.processes:
        for wait in state.waits:
            is_known = any(address in wait.reason for address in causes)
            if is_known or (_is_of_store(wait.reason) and any(p.name == "redis" for p in still)):
                continue
            yield Finding(
                rule="process_waits",
                sentence=f"{_name(state)} waits for {_readable(snapshot, wait.reason)}.",
                cure=wait.cure or "It goes on by itself once that answers.",
                since=snapshot.now - seconds_of(wait.duration),
                subject=f"{state.process.name}: {wait.reason}",
            )


def _readable(snapshot: Snapshot, reason: str) -> str:
    """With the name of the process that is called, not its address and its package."""
    for state in snapshot.processes:
        if state.process.address:
            reason = reason.replace(f"of {state.process.address}", f"of {state.process.name}")
    return re.sub(r"/[\w.]+/(\w+) of ", r"\1 of ", reason)


def _is_of_store(reason: str) -> bool:
    return "the store does not answer" in reason


def _name(state: ProcessState) -> str:
    """With what finds it: its id on this machine, else its address."""
    process = state.process
    place = f" at {process.address}" if process.address else ""
    return f"{process.name} (process {process.pid})" if process.pid else f"{process.name}{place}"


def unreachable_services(snapshot: Snapshot) -> Iterator[Finding]:
    """Services that do not answer, or reject the request, as far as nothing else explains it."""
    beyond = services_beyond(snapshot)  # `cut_links` says so
    states = {each.process.address: each for each in snapshot.processes}
    for name, error in snapshot.problems.items():
        service, address = SERVICES[name], snapshot.addresses.get(name, "?")
        state = states.get(address)
        is_late = isinstance(error, UnavailableError | DeadlineError)
        if name in beyond or (is_late and state and _is_explained(state)):
            continue
        is_absent = isinstance(error, UnavailableError)
        if is_absent and (_is_launched(snapshot, state) or _may_load(snapshot, name)):
            yield Finding(
                rule="service_loads",
                sentence=f"The {service.name} at {address} does not answer yet: it is being "
                "started, or loads its model.",
                cure=_starting(snapshot, service.module),
                since=snapshot.started,
                subject=name,
                normal=True,
            )
        elif is_late:
            yield Finding(
                rule="service_does_not_answer",
                sentence=f"The {service.name} at {address} does not answer: {error}.",
                cure=f"Start it with `python -m {service.module}`, or name its address with "
                f"{service.flag} or {service.variable}.",
                subject=name,
            )
        else:
            yield Finding(
                rule="service_refuses",
                sentence=f"The {service.name} at {address} rejects the request: {error}.",
                cure="Check --run, and SEAMFLOW_TOKEN if the services require a token.",
                subject=name,
            )


def _is_explained(state: ProcessState) -> bool:
    """It stands still, which is said, or answers, and says itself what it waits for."""
    return bool(state.stopped or state.is_silent or state.answers)


def gateway_not_serving(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.gateway_serves is False:
        yield Finding(
            rule="gateway_not_serving",
            sentence=f"Agents wait for the gateway at {snapshot.addresses.get('gateway', '?')}: "
            "it runs but does not serve.",
            cure="It is starting or draining; see its log.",
            normal=True,
        )


def _is_launched(snapshot: Snapshot, state: ProcessState | None) -> bool:
    """Whether a launcher of this machine, which is alive, starts the service, now or later."""
    here = [each for each in snapshot.processes if each.process.pid is not None]
    return any(each.is_running for each in here) and (
        state is None or state.process.pid is not None
    )


def _may_load(snapshot: Snapshot, name: str) -> bool:
    """Whether a service that has a model may be at its start: the trainer publishes once it is."""
    return name in _WITH_MODEL and snapshot.weights_answer and snapshot.manifest is None


def _starting(snapshot: Snapshot, module: str) -> str:
    if snapshot.logs:  # the launcher starts it again by itself
        return f"{snapshot.logs} says how far each process is; the launcher starts each again."
    return (
        "Its log says how far it is, or why it ended; if it does not run, start it with "
        f"`python -m {module}`."
    )
