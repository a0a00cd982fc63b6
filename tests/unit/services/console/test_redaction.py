"""What is shared has no credentials in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.console.bundle import Redaction, known_secrets


@pytest.mark.parametrize(
    "secret",
    [
        "sk-abcdefghijklmnop1234",
        "ghp_abcdefghijklmnopqrst1234",
        "AKIAIOSFODNN7EXAMPLE",
        "hf_abcdefghijklmnopqrstuv",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----",
        "a-secret-of-this-run",
    ],
)
def test_a_secret_is_removed_from_texts_and_names(secret: str) -> None:
    """Wherever it stands in the values; the rest stays."""
    redaction = Redaction(["a-secret-of-this-run"])
    values = {"text": f"use {secret} here", secret: [1, {"deep": secret}], "number": 2}
    written = json.dumps(redaction.values(values))
    assert json.dumps(secret)[1:-1] not in written
    assert "use [removed] here" in written and '"number": 2' in written
    assert redaction.num_removed == 3


def test_the_value_of_a_setting_is_removed() -> None:
    """And user and password of a URL; ordinary text is left alone."""
    redaction = Redaction()
    assert "hunter22" not in redaction.values('password = "hunter22"')
    assert redaction.values("redis://me:pw1@host/0") == "redis://[removed]@host/0"
    ordinary = "The token count is 12, the key idea: a secret garden."
    assert redaction.values(ordinary) == ordinary


def test_tokens_that_spell_a_secret_lose_text_and_id() -> None:
    """Ids would reveal it together with the tokenizer."""
    texts = ["see ", "sk-", "abcdefgh", "ijklmnop", " now"]
    window = {"texts": texts, "ids": [1, 2, 3, 4, 5], "total": 5}
    assert Redaction().window(window) == {
        "texts": ["see ", "█", "█", "█", " now"],
        "ids": [1, -1, -1, -1, 5],
        "total": 5,
    }


def test_the_secrets_of_a_run_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, and this process's variables; short values would remove ordinary words."""
    (tmp_path / "credential_secret").write_text("of-the-gateway")
    (tmp_path / "redis.conf").write_text("requirepass of-the-store\n")
    monkeypatch.setenv("SOME_API_KEY", "of-a-variable")
    monkeypatch.setenv("OTHER_TOKEN", "short")
    found = known_secrets(tmp_path)
    assert {"of-the-gateway", "of-the-store", "of-a-variable"} <= found
    assert "short" not in found
