"""The bytes of single tokens: parts of a text that may cut a character."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in the vocabularies of SentencePiece."""


class TokenTexts:
    """Bytes of the tokens of a tokenizer."""

    def __init__(self, tokenizer: Any, added: Mapping[int, str]) -> None:
        """`added` are the texts, by id, of tokens that are not in the vocabulary's letters."""
        self._tokenizer = tokenizer
        self._known = {token_id: text.encode() for token_id, text in added.items()}
        decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
        self._byte_of = _bytes_by_letter() if '"ByteLevel"' in decoder else {}

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8, of which the token may have a part; empty for an id without a token."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._decoded(token_id)
        return found

    def _decoded(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._byte_of and all(letter in self._byte_of for letter in piece):
            return bytes(self._byte_of[letter] for letter in piece)
        if byte := _ONE_BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()


def _bytes_by_letter() -> dict[str, int]:
    """The alphabet of byte-level tokenizers (GPT-2): printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in printable}, **shifted}
