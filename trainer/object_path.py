"""A folder or file of an object store, by its URL, with what checkpoints need of `pathlib.Path`.

fsspec has the stores: `s3://bucket/run` needs the package s3fs. A written object appears whole, or
not at all; there are no renames and no folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

_BLOCK_BYTES = 64 << 20
"""Of a read ahead, and of a part of an upload."""


@dataclass(frozen=True, order=True, slots=True)
class ObjectPath:
    """A URL; what the store raises is an OSError or a ValueError that names it."""

    url: str

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.url.rpartition("/")[0])

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    def iterdir(self) -> Iterator[ObjectPath]:
        """What is directly below it; none if there is nothing."""
        with self._named_errors():
            try:
                names = _store(self.url).ls(self.url, detail=False)
            except FileNotFoundError:
                names = []
        yield from (self / name.rstrip("/").rpartition("/")[2] for name in names)

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        return (path for path in self.iterdir() if fnmatch(path.name, pattern))

    def is_file(self) -> bool:
        with self._named_errors():
            return bool(_store(self.url).isfile(self.url))

    exists = is_file

    def read_bytes(self, start: int = 0, end: int | None = None) -> bytes:
        """Its content, or the bytes from `start` to before `end`."""
        with self._named_errors():
            content: bytes = _store(self.url).cat_file(self.url, start=start, end=end)
        return content

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_text(self, text: str) -> None:
        """Replace its content; durable."""
        with self._named_errors():
            _store(self.url).pipe_file(self.url, text.encode())

    def open(self, mode: str) -> Any:
        """A file in binary mode; what is written appears after `close` and `commit`."""
        with self._named_errors():
            options = {} if mode == "rb" else {"autocommit": False}
            return _store(self.url).open(self.url, mode, block_size=_BLOCK_BYTES, **options)

    def unlink(self) -> None:
        """Delete the object, if there is one."""
        with self._named_errors(), suppress(FileNotFoundError):
            _store(self.url).rm_file(self.url)

    def check(self) -> None:
        """Write and delete an object.

        Raises:
            ValueError: its package, its bucket or the permission is missing.
            OSError: the store does not answer.
        """
        probe = self / ".probe"
        try:
            probe.write_text("")
            probe.unlink()
        except (FileNotFoundError, PermissionError) as error:
            raise ValueError(
                f"checkpoint.store {self.url} cannot be written ({error}): create the bucket, and "
                "give credentials that may write there in the environment, such as AWS_PROFILE"
            ) from error

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Raise OSError, whatever a store's library raises, with the URL."""
        try:
            yield
        except (FileNotFoundError, ValueError):
            raise
        except Exception as error:
            name = type(error).__name__
            kind = PermissionError if "Credentials" in name else OSError
            raise kind(f"{self.url}: {error or name}") from error


Folder = Path | ObjectPath
"""Where checkpoints are."""
AnyFolder = TypeVar("AnyFolder", bound=Folder)
"""One of both."""


def listed(folder: AnyFolder, pattern: str = "*") -> list[AnyFolder]:
    """What is directly below a folder and has such a name, in order."""
    found: list[Any] = [*folder.glob(pattern)]
    return sorted(found)


def place(text: str | Path) -> Folder:
    """The folder that a path or a URL names."""
    return ObjectPath(str(text)) if "://" in str(text) else Path(text)


@lru_cache(maxsize=8)
def _filesystem(protocol: str) -> Any:
    try:
        import fsspec

        # Other ranks and trainers write too: what was listed before says nothing.
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{protocol}:// needs a package that is missing ({error}): pip install "
            "'seamflow[object-store]' for s3://, or the one of fsspec that is named"
        ) from error


def _store(url: str) -> Any:
    return _filesystem(url.partition("://")[0])
