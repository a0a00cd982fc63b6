"""What the package promises by name."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import seamflow


def test_all_names_exist_and_are_sorted() -> None:
    """`__all__` is the whole public surface."""
    assert list(seamflow.__all__) == sorted(seamflow.__all__)
    assert all(hasattr(seamflow, name) for name in seamflow.__all__)


def test_version_is_that_of_the_distribution() -> None:
    """One version, told in one way."""
    assert seamflow.__version__ == importlib.metadata.version("seamflow")


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    """An agent pays for grpcio and protobuf, not for torch."""
    heavy = "{'torch', 'numpy', 'redis', 'transformers'}"
    code = f"import sys, seamflow.runner, seamflow.cli.main; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_package_is_typed() -> None:
    """Type checkers of users read our annotations."""
    assert (Path(seamflow.__file__).parent / "py.typed").is_file()
