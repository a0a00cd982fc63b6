"""What the checks accept is exact beyond every window, packed, alone, scored and sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.lib.transformer import can_pack
from tests.suites.models.kinds import TOLERANCE, WINDOWED, Compared, Kind, compare


def compared(model_type: str, folder: Path) -> Compared:
    """One kind, with its windows."""
    return compare(Kind(model_type, WINDOWED.get(model_type, {})), folder / "model")


@pytest.mark.parametrize("model_type", ["mistral", "phimoe", "gpt_neo"])
def test_kinds_with_windows_are_exact(tmp_path: Path, model_type: str) -> None:
    """phimoe and GPT-Neo have them in their masks alone."""
    found = compared(model_type, tmp_path)
    assert not found.refusals
    assert set(found.differences) == {"trainer", "scorer", "engine"}
    assert max(found.differences.values()) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["rwkv", "bart", "roformer"])
def test_kinds_that_the_engine_cannot_cache_are_refused_there(
    tmp_path: Path, model_type: str
) -> None:
    """Trainer and scorer compute them exactly."""
    found = compared(model_type, tmp_path)
    assert not found.silent
    assert list(found.refusals) == ["engine"]
    assert f"cannot compute model_type {model_type} exactly" in found.refusals["engine"]
    assert 'engine = "sglang"' in found.refusals["engine"]


def test_a_kind_whose_rows_depend_on_each_other_is_refused(tmp_path: Path) -> None:
    """Doge keeps the most important keys of all that are in a pass."""
    found = compared("doge", tmp_path)
    assert not found.silent
    assert "computes a row otherwise when others are computed beside it" in found.refusals["scorer"]


def test_without_the_trial_packed_rows_would_differ_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(can_pack, "_packs_long_rows", lambda _: True)
    assert set(compared("phimoe", tmp_path).silent) == {"trainer", "scorer"}
