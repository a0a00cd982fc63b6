"""Seconds to and from the Duration and Timestamp messages of protobuf."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def seconds_of(message: Duration | Timestamp) -> float:
    """Seconds of a duration, or Unix seconds of a timestamp; 0 for an unset field."""
    return message.seconds + message.nanos / 1e9


def to_duration(seconds: float) -> Duration:
    """The nearest Duration, in nanoseconds."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def to_timestamp(seconds: float) -> Timestamp:
    """The nearest Timestamp to Unix seconds, in nanoseconds."""
    timestamp = Timestamp()
    timestamp.FromNanoseconds(round(seconds * 1e9))
    return timestamp
