"""A secret in a file that may be rotated while the process runs."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr
from seamflow.credentials import SecretFile


class FileSecret(SecretStr):
    """A secret whose value is what its file holds now."""

    def __init__(self, path: Path) -> None:
        """Read `path`.

        Raises:
            OSError: it cannot be read.
            ValueError: it is empty, or no text.
        """
        self._file = SecretFile(path)
        super().__init__(self._file.text())

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def get_secret_value(self) -> str:
        """The current value; a change of the file is seen within a second."""
        return self._file.text()

    def look(self) -> None:
        """See a change of the file at once."""
        self._file.text(now=True)
