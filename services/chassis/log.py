"""Structured logs: JSON lines on stdout with the context of the current call.

Fields: ts, level, msg, service, version, instance; inside a call also request_id, trace_id,
span_id, method and peer. Tokens, texts and secrets are never logged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from seamflow.printable import escaped

from services.chassis.config.settings import ServerConfig
from services.chassis.version import version

_SECRET_KEYS = frozenset({"token", "authorization", "password", "secret", "credential"})


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """A logger: `get_logger().info("lease_expired", lease_id=lease_id)`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def configure(config: ServerConfig, service: str) -> None:
    """Send this process's logs, and those of its libraries, to stdout as `config` asks."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        _identify(service, config.instance),
        _redact,
    ]
    structlog.configure(
        processors=[
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(config.log_level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_formatter(config, shared))
    logging.basicConfig(handlers=[handler], level=config.log_level.upper(), force=True)


def _formatter(
    config: ServerConfig, shared: list[structlog.typing.Processor]
) -> structlog.stdlib.ProcessorFormatter:
    meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if config.log_format == "console":
        render: list[structlog.typing.Processor] = [_escape, structlog.dev.ConsoleRenderer()]
    else:
        render = [
            # Without the frames' variables: they hold tokens, texts and secrets.
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.EventRenamer("msg"),
            structlog.processors.JSONRenderer(),
        ]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[meta, *render])


def _identify(service: str, instance: str) -> structlog.typing.Processor:
    identity = {"service": service, "version": version(), "instance": instance}

    def add(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**identity, **event}

    return add


def _escape(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For a terminal, which text of agents must not control; JSON escapes by itself."""
    return {k: escaped(v) if isinstance(v, str) else v for k, v in event.items()}


def _redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in _SECRET_KEYS & event.keys():
        event[key] = "***"
    return event
