"""Prometheus metrics named `seamflow_<service>_<name>`.

Names end in their unit (`_total`, `_seconds`, `_bytes`); labels never hold ids. `help`
is the word of prometheus-client.
"""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

# From a fast unary call to a long generation.
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 300, 1800),
)

# Cached: a second request for a metric of a process must return the same object.


@cache
def counter(service: str, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:  # noqa: A002
    """A monotonic counter, e.g. `acknowledged_tokens_total`."""
    return Counter(f"seamflow_{service}_{name}", help, labels)


@cache
def gauge(service: str, name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:  # noqa: A002
    """A value that can rise and fall, e.g. `ready_samples`."""
    return Gauge(f"seamflow_{service}_{name}", help, labels)


@cache
def histogram(
    service: str,
    name: str,
    help: str,  # noqa: A002
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = _SECONDS,
) -> Histogram:
    """A distribution, by default of seconds between 1 ms and 30 min."""
    return Histogram(f"seamflow_{service}_{name}", help, labels, buckets=buckets)
