"""The `seamflow` command: look at a run, find out why it waits, take a node out, train, serve.

Exit codes: 0 well, 64 wrong usage, 69 a service does not answer, 78 wrong configuration.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from seamflow.cli import (
    export,
    operation,
    run_commands,
    service_modules,
    status,
    tail,
    transcripts,
)
from seamflow.cli.init_project import init_project
from seamflow.cli.parser import make_parser
from seamflow.errors import (
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    SeamflowError,
)
from seamflow.inspect.endpoints import UsageError, note
from seamflow.printable import escaped_output

_OK, _USAGE, _UNAVAILABLE, _CONFIG = 0, 64, 69, 78  # sysexits.h
_MODULES = (
    init_project,
    service_modules,
    status,
    tail,
    transcripts,
    export,
    run_commands,
    operation,
)
"""Each registers its verbs, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in service_modules.MODULES:
        try:
            service_modules.launch(arguments[0], arguments[1:])
        except UsageError as error:
            sys.exit(_error(str(error), _CONFIG))
    with escaped_output():
        code = _code_of(arguments)
    sys.exit(code)


def _code_of(arguments: Sequence[str]) -> int:
    try:
        return _run(arguments)
    except UsageError as error:
        return _error(str(error), _USAGE)
    except SeamflowError as error:
        return _error(str(error), _code(error))
    except KeyboardInterrupt:
        return _OK
    except BrokenPipeError:  # `seamflow tail … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK


def _run(arguments: Sequence[str]) -> int:
    parser = make_parser(module.register for module in _MODULES)
    if not arguments:
        parser.print_help()
        return _OK
    given = parser.parse_args(arguments)
    code: int = given.command(given)
    return code


def _code(error: SeamflowError) -> int:
    if isinstance(error, InvalidRequestError | NotFoundError):
        return _USAGE
    return _CONFIG if isinstance(error, PermissionDeniedError) else _UNAVAILABLE


def _error(message: str, code: int) -> int:
    note(message)
    return code


if __name__ == "__main__":
    main()
