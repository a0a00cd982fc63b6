"""Text of token ids by the tokenizer of a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seamflow.token_text import (
    Decode,
    decoder_of,
    load_decoder,
    read_tokenizer,
    token_numbers,
)

from services.chassis.log import get_logger

_CONTEXT = 4
"""Tokens before a window that its first token's text may depend on."""
_LONGEST = 12
"""Tokens of one character, or of bytes that are none; then they are shown as they are."""
_log = get_logger()


class TokenText:
    """Decodes ids, whole or one by one; special tokens are shown."""

    def __init__(self, decode: Decode, marks: Mapping[str, int]) -> None:
        """`marks`: ids of the tokenizer's added tokens, by text."""
        self.decode = decode
        self.marks = marks

    def texts(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """The text of each id, which joined are the whole text.

        A character of several tokens is the text of its last one. `before`: what precedes.
        """
        given = [*before[-_CONTEXT:], *ids]
        shown, read, texts = 0, len(given) - len(ids), list[str]()
        for end in range(read + 1, len(given) + 1):
            known = self.decode(given[shown:read]) if read > shown else ""
            text = self.decode(given[shown:end])[len(known) :]
            is_whole = not text.endswith("\N{REPLACEMENT CHARACTER}")
            if is_whole or end - read > _LONGEST or end == len(given):
                texts.append(text)
                shown, read = read, end
            else:
                texts.append("")
        return texts


def load_token_text(folder: str) -> TokenText:
    """The tokenizer of a model folder; without one, ids stand for text."""
    file = Path(folder) / "tokenizer.json"
    try:
        if not (folder and file.is_file()):
            return TokenText(load_decoder(folder) if folder else token_numbers, {})
        tokenizer = read_tokenizer(file)
    except ValueError as error:
        _log.info("ids_stand_for_text", detail=str(error))
        return TokenText(token_numbers, {})
    marks = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    return TokenText(decoder_of(tokenizer), marks)
