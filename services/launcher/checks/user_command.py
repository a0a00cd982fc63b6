"""A command that loads the user's code, run to its end before the run starts."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from seamflow.user_code.left_processes import MARK, end_left


def run_command(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Wait for a command, not for processes that it leaves, which are killed; its output.

    The output goes to files: a pipe ends only when everyone who has it ends, such as a server that
    a module of the user's starts when it is imported.
    """
    mark = secrets.token_hex(16)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                env={**environment, MARK: mark},
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        finally:
            end_left(mark)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)
