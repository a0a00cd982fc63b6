"""From messages to token ids without ever encoding a sampled token again.

The matched prefix keeps its sampled ids, and only the messages after it are rendered and encoded.
Where a template rewrites history (for example, drops old reasoning), `keeps_history` is False and
the whole prompt is matched by its ids.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any

from rollout.gateway.prompt.answer.response_format import (
    Answer,
    AnswerStream,
    CallCounter,
    load_response_format,
)
from rollout.gateway.prompt.answer_tail import AnswerTail
from rollout.gateway.prompt.conversation import Conversation, TemplateMessage, message_keys
from rollout.gateway.prompt.left_out import (
    joins_system_messages,
    parts_left_out,
    with_joined_system,
)
from rollout.gateway.prompt.token_text import StopStrings, TokenTexts
from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.lib.model_files.end_ids import end_ids, warn_of_end
from services.lib.model_files.json_file import check_json_files
from services.lib.model_files.model_folder import check_vocabulary, vocabulary_size
from services.lib.rendering.renderer import (
    RenderError,
    RenderLimitError,
    RenderLimits,
    shared_renderer,
)

_MAX_KNOWN = 16_384
_MARK = f"reasoning-{uuid.uuid4().hex}"
_MAX_RENDERED = 8
"""Answers of a conversation around each of which it is rendered, to find whether it is kept."""
_ANY_ID = 1 << 31
_LIMITS = RenderLimits()
_DROPPED = "reasoning"
"""Stands for reasoning that is not known."""


class ChatTemplate:
    """Tokenizer, chat template and response format of one model folder."""

    def __init__(
        self,
        folder: Path,
        response_format: str = "auto",
        limits: RenderLimits = _LIMITS,
    ) -> None:
        """Load from a Hugging Face folder; rendering once is bounded by `limits`.

        Raises:
            ConfigError: a file is missing or cannot be read; it is named.
        """
        self._renderer = shared_renderer(limits)
        self._renderer.warm()
        self._tokenizer = _load_tokenizer(folder)
        _check_vocabulary(folder)
        self.name = folder.resolve().name
        self.source: str = self._tokenizer.chat_template or ""
        """The template; empty: the model has none."""
        parts = [self.source, _vocabulary_digest(folder)]
        self.fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        """Changes whenever the same messages could give other ids."""
        self.stop_token_ids = end_ids(folder)
        self.vocabulary_size = len(self._tokenizer)
        """Ids below this are valid in a prompt."""
        self.model_vocabulary_size = max(vocabulary_size(folder) or _ANY_ID, self.vocabulary_size)
        """Ids below this may be sampled: a model may have more than its tokenizer."""
        self.byte_ids = _byte_ids(self._tokenizer)
        """Ids of single bytes, of a tokenizer of letters that falls back to bytes."""
        self._named_tokens = dict(self._tokenizer.special_tokens_map)
        special = _special_tokens(self._tokenizer)
        self._special_ids = frozenset(special)
        self.marker_ids = self._special_ids | self.stop_token_ids
        """Special tokens, and those that end an answer: no part of its text."""
        self.token_bytes = TokenTexts(self._tokenizer, _added_tokens(self._tokenizer)).bytes_of
        self._stops = [special.get(i) or self.text([i]) for i in sorted(self.stop_token_ids)]
        self.format = load_response_format(
            response_format, self._tokenizer, [*special.values()], self._stops
        )
        # gpt-oss names reasoning in its own way.
        self._says_thinking = ".thinking" in self.source and "reasoning_content" not in self.source
        # Digests of conversations whose history is known to be kept, oldest first.
        self._kept: dict[str, None] = {}
        self._lock = threading.Lock()
        self._backend = _backend(self._tokenizer)
        if (warning := warn_of_end(folder)) is not None:
            get_logger().warning("answers_do_not_end", problem=warning)

    def fingerprint_of(self, conversation: Conversation) -> str:
        """The fingerprint with the conversation's tools and template arguments."""
        if not (conversation.tools or conversation.arguments):
            return self.fingerprint
        extra = json.dumps([list(conversation.tools), conversation.arguments], sort_keys=True)
        return hashlib.sha256(f"{self.fingerprint}\0{extra}".encode()).hexdigest()

    def keeps_history(self, conversation: Conversation) -> bool:
        """Whether every answer is rendered where it was sampled, with its text.

        Conversations found to be kept are remembered, so a later turn checks only its new answers.
        Of many new ones only the newest are checked by rendering the conversation around each.
        """
        whole, keys = self.render(conversation), message_keys(conversation.messages)
        fingerprint, ends = self.fingerprint_of(conversation), conversation.answer_ends
        newest = ends[-_MAX_RENDERED:]
        for end in reversed(newest):
            if not self._is_kept(conversation, end, whole):
                return False
            if _name(fingerprint, keys[: end - 1]) in self._kept:
                break
        else:
            if not self._are_in_order(conversation, ends[: -len(newest)]):
                return False
        self._remember(_name(fingerprint, keys))
        return True

    def conversation_of(self, given: Conversation) -> Conversation:
        """The conversation with the system messages that the template takes."""
        return with_joined_system(given) if self._joins_system else given

    @cached_property
    def left_out(self) -> Set[str]:
        """Which of "tools", "tool_calls", "tool" (their results) the template does not write."""
        return parts_left_out(self.render)

    @cached_property
    def _joins_system(self) -> bool:
        return joins_system_messages(self.render)

    def encode(self, conversation: Conversation) -> list[int]:
        """Ids of the whole prompt, including the start of the answer."""
        return self.encode_text(self.render(conversation))

    def encode_after(
        self, conversation: Conversation, num_matched: int, last_token_id: int
    ) -> list[int] | None:
        """Ids that follow a prefix which ends with the answer `messages[num_matched - 1]`.

        `last_token_id` is the prefix's last id: a terminator the policy sampled itself is not
        repeated, a missing one is added here, as an environment token. None: the template does not
        render later messages after the answer.
        """
        tail = self._tail(conversation, num_matched)
        text = tail.text()
        if text is None:
            return None
        ids = self.encode_text(text)
        is_sampled = bool(ids) and self._is_terminator(ids[0], last_token_id, tail)
        return ids[1:] if is_sampled else ids

    def parse(
        self,
        token_ids: Sequence[int],
        stop: str | None,
        conversation: Conversation | None,
        opening: str = "",
        *,
        has_calls: bool = True,
    ) -> Answer:
        """Parse the sampled tokens of an answer; its content ends before the stop string `stop`.

        `opening` is the start of the answer that the prompt ends with; without `has_calls` what
        looks like a tool call is content.
        """
        stops = [] if stop is None else [stop]
        text = opening + StopStrings(self, stops).text_before(token_ids)
        if conversation is None:
            return self.format.parse(text, "", has_calls=has_calls)
        position = conversation.num_before + len(conversation.messages)
        end, tools = self.prompt_end(conversation), conversation.tools
        return self.format.parse(text, end, tools, position, has_calls=has_calls)

    def stream(
        self, conversation: Conversation | None, stops: Sequence[str], *, has_calls: bool = True
    ) -> AnswerStream:
        """Increments of the answer to a conversation, which ends before the first of `stops`."""
        end = self.prompt_end(conversation) if conversation is not None else ""
        return self.format.stream(end, stops, has_calls=has_calls)

    def call_counter(self, conversation: Conversation) -> CallCounter:
        """Counts the tool calls of the answer to a conversation as it grows."""
        return self.format.call_counter(self.prompt_end(conversation))

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of any ids, special tokens included."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, conversation: Conversation, *, add_prompt: bool = True) -> str:
        """The text of a conversation, with the start of the answer if `add_prompt`.

        Raises:
            ValueError: the template cannot render it, or there is none.
        """
        if not self.source:
            raise ValueError("the model's tokenizer has no chat template: send token_ids")
        if clash := sorted(self._named_tokens.keys() & conversation.arguments.keys()):
            raise RenderError(f"the tokenizer sets {clash[0]!r}: leave it out")
        return self._rendered(
            [self._as_template_takes(m) for m in conversation.messages],
            tools=conversation.tools,
            add_prompt=add_prompt,
            variables={**self._named_tokens, **conversation.arguments},
        )

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        try:
            return self._renderer.render(self.source, messages, **options)
        except RenderLimitError as error:
            raise RenderLimitError(f"the chat template of model {self.name!r} {error}") from error
        except RenderError as error:
            text = f"the chat template cannot render them: {error}"
            raise RenderError(text, error.kind) from error

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text, without special tokens around it; may be called in any thread."""
        if self._backend is None:
            with self._lock:
                return list(self._tokenizer.encode(text, add_special_tokens=False))
        # Unlike `encode` of one text it lets other threads of the interpreter run meanwhile.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoded.ids)

    def _is_kept(self, conversation: Conversation, end: int, whole: str) -> bool:
        answer = conversation.messages[end - 1]
        before = self._render_until(conversation, end - 1)
        if "reasoning_content" not in answer and self.format.opened_reasoning(before):
            # There was some, which the client has dropped: would the template drop it too?
            answer = {**answer, "reasoning_content": _DROPPED}
            messages = [*conversation.messages]
            messages[end - 1] = answer
            whole = self.render(conversation.with_messages(messages))
        tail = self._tail(conversation, end).text()
        if tail is None or not (whole.startswith(before) and whole.endswith(tail)):
            return False
        rendered = whole[len(before) : len(whole) - len(tail)]
        texts = (answer["content"], answer.get("reasoning_content") or "")
        return all(text.strip() in rendered for text in texts)

    def _are_in_order(self, conversation: Conversation, ends: Sequence[int]) -> bool:
        """Whether the texts of these answers follow each other where all is rendered."""
        if not ends:
            return True
        messages = [*conversation.messages]
        opens_reasoning = self.format.opened_reasoning(self.prompt_end(conversation))
        for end in ends:
            if "reasoning_content" not in messages[end - 1] and opens_reasoning:
                messages[end - 1] = {**messages[end - 1], "reasoning_content": _MARK}
        whole, position = self.render(conversation.with_messages(messages)), 0
        for answer in (messages[end - 1] for end in ends):
            for text in (answer.get("reasoning_content") or "", answer["content"]):
                position = whole.find(text.strip(), position)
                if position < 0:
                    return False
                position += len(text.strip())
        return True

    def _remember(self, name: str) -> None:
        with self._lock:
            if len(self._kept) >= _MAX_KNOWN:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = None

    def _tail(self, conversation: Conversation, end: int) -> AnswerTail:
        return AnswerTail(self.render, self._stops, conversation, end)

    def _is_terminator(self, first: int, last_sampled: int, tail: AnswerTail) -> bool:
        """Whether the tail begins with the terminator that the policy has sampled, or its like."""
        if first not in self._special_ids:
            return False
        is_other = last_sampled in self.stop_token_ids  # such as <|return|> for <|end|>
        return first == last_sampled or (is_other and tail.has_terminator())

    def _as_template_takes(self, message: TemplateMessage) -> dict[str, Any]:
        taken = dict(message)
        if self._says_thinking and "reasoning_content" in taken:
            taken["thinking"] = taken.pop("reasoning_content")
        if "tool_calls" in taken and self._takes_arguments_as_text:
            taken["tool_calls"] = [_with_arguments_as_text(call) for call in taken["tool_calls"]]
        return taken

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether the template wants arguments as JSON, as DeepSeek's do; others take objects."""
        function = {"name": "probe", "arguments": {"value": _MARK}}
        call = {"id": "000000000", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}, answer]
        try:
            text = self._rendered(messages, variables=self._named_tokens)
        except RenderError as error:
            return error.kind == "TypeError"  # it joins them to text
        return f"'{_MARK}'" in text  # Python's form of an object

    def _render_until(self, conversation: Conversation, num_messages: int) -> str:
        return self.render(conversation.with_messages(conversation.messages[:num_messages]))

    def prompt_end(self, conversation: Conversation) -> str:
        """What the template writes after the last message: the start of the answer."""
        if conversation.prompt_end is not None:
            return conversation.prompt_end
        if not self.source:
            return ""
        with_prompt = self.render(conversation)
        without = self.render(conversation, add_prompt=False)
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""


def _with_arguments_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _name(fingerprint: str, keys: Sequence[str]) -> str:
    return hashlib.sha256("".join((fingerprint, *keys)).encode()).hexdigest()


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # heavy: only this process needs it

    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {str(folder)!r} has no config.json: name a Hugging Face folder")
    missing = ConfigError(
        f"model {str(folder)!r} has no usable tokenizer: save one with "
        f"tokenizer.save_pretrained({str(folder)!r})"
    )
    if not _vocabulary_files(
        folder
    ):  # transformers would create an empty tokenizer for some models
        raise missing
    try:
        check_json_files(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises anything at a damaged file
        raise missing from error


def _check_vocabulary(folder: Path) -> None:
    """Check that the model knows each id of the tokenizer; weights need not be here."""
    try:
        check_vocabulary(folder, {})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _backend(tokenizer: Any) -> Any:
    """The tokenizer in Rust, which threads may share; None: it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def _vocabulary_files(folder: Path) -> list[Path]:
    names = (
        *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
        *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    )
    return [folder / name for name in names if (folder / name).is_file()]


def _vocabulary_digest(folder: Path) -> str:
    files = _vocabulary_files(folder)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Text of each special token by its id, also of those without a role of their own."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    return {i: text for i, text in _added_tokens(tokenizer).items() if i in special}


def _added_tokens(tokenizer: Any) -> dict[int, str]:
    """Text of each special or added token by its id: it is written as it is."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    vocabulary = tokenizer.get_vocab()
    tokens = (f"<0x{value:02X}>" for value in range(256))
    return frozenset(vocabulary[token] for token in tokens if token in vocabulary)
