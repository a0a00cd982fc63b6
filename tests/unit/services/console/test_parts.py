"""Parts of a conversation by the marks of its template, and tokens whose text needs others."""

from __future__ import annotations

from services.console.text import TokenText, parts_of

WORDS = (
    "<|im_start|>",
    "<|im_end|>",
    "system",
    "user",
    "assistant",
    "tool",
    "\n",
    "hello",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[1]",
    "bye",
)
CHATML = TokenText(
    lambda ids: "".join(WORDS[i] for i in ids),
    {word: i for i, word in enumerate(WORDS) if word.startswith("<")},
)


def ids(text: str) -> list[int]:
    """Ids of words separated by spaces; "|" is a line break."""
    return [WORDS.index("\n" if word == "|" else word) for word in text.split()]


def shown(prompt: str, answer: str) -> list[tuple[str, str, str]]:
    """Role, kind and text of each part."""
    given = [*ids(prompt), *ids(answer)]
    sampled = [False] * len(ids(prompt)) + [True] * len(ids(answer))
    return [
        (p.role, p.kind, CHATML.decode(given[p.start : p.start + p.count]))
        for p in parts_of(given, sampled, CHATML)
    ]


def test_who_speaks_is_read_from_the_marks() -> None:
    """The header of the answer is part of no text."""
    prompt = "<|im_start|> system | hello <|im_end|> | <|im_start|> user | bye <|im_end|> | "
    prompt += "<|im_start|> assistant |"
    assert shown(prompt, "hello <|im_end|>") == [
        ("system", "text", "hello"),
        ("user", "text", "bye"),
        ("assistant", "text", "hello"),
    ]


def test_reasoning_and_calls_are_parts_of_their_own() -> None:
    """Of an answer; what follows them is text again."""
    answer = "<think> hello </think> bye <tool_call> [1] </tool_call> <|im_end|>"
    assert shown("<|im_start|> user | bye <|im_end|>", answer) == [
        ("user", "text", "bye"),
        ("assistant", "reasoning", "hello"),
        ("assistant", "text", "bye"),
        ("assistant", "tool_call", "[1]"),
    ]


def test_the_result_of_a_tool_is_the_tools() -> None:
    """By its role in the template."""
    prompt = "<|im_start|> tool | [1] <|im_end|>"
    assert shown(prompt, "bye") == [("tool", "tool_result", "[1]"), ("assistant", "text", "bye")]


def test_without_marks_prompt_and_answer_are_one_part_each() -> None:
    """As of a model with an unknown template."""
    assert shown("hello user", "bye") == [
        ("user", "text", "hellouser"),
        ("assistant", "text", "bye"),
    ]


def test_a_mark_that_the_policy_writes_makes_nobody_else_speak() -> None:
    """An answer cannot look like a message of the system."""
    roles = {role for role, _, _ in shown("hello", "<|im_start|> system | bye")}
    assert roles == {"user", "assistant"}


def test_a_character_of_several_tokens_is_the_text_of_its_last() -> None:
    """Joined, the texts are the whole text; bytes that are none are shown in the end."""
    raw = "aé€".encode()
    bytewise = TokenText(lambda given: bytes(given).decode(errors="replace"), {})
    assert bytewise.texts(list(raw)) == ["a", "", "é", "", "", "€"]
    broken = bytewise.texts([*b"a", 0xE2, 0x82])
    assert "".join(broken) == bytes([*b"a", 0xE2, 0x82]).decode(errors="replace")


def test_a_window_continues_what_precedes_it() -> None:
    """As of tokenizers whose first token has no space before it."""

    def decode(given: list[int]) -> str:
        return " ".join(f"w{i}" for i in given)

    spaced = TokenText(decode, {})  # type: ignore[arg-type]
    assert spaced.texts([3, 4], [1, 2]) == [" w3", " w4"]
    assert spaced.texts([3, 4]) == ["w3", " w4"]
