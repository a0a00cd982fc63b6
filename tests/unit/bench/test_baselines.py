"""Where benches look for what `make` installs."""

from __future__ import annotations

from bench.baselines.generation.sglang_server import PYTHON
from tools.provenance import ROOT


def test_sglang_is_looked_for_where_make_installs_it() -> None:
    recipe = (ROOT / "Makefile").read_text()
    folder = PYTHON.parents[1].relative_to(ROOT)
    assert f"SGLANG = {folder}/" in recipe
