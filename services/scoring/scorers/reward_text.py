"""The policy's token ids as the text that a reward model of another tokenizer or template reads.

A sample has token ids alone. Its messages are found again by the policy's chat template: what it
writes between messages is known from a conversation of marks. They count if the template renders
them to the sample's text; else the model reads that text without special tokens.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.lib.model_files.end_ids import chat_template, template_variables
from services.lib.model_files.model_folder import other_token
from services.lib.rendering.renderer import RenderError, RenderLimits, shared_renderer

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]
_ROLES = ("system", "user", "assistant", "user", "assistant")


def own_text(policy: Path | None, model: Path) -> OwnText | None:
    """How a reward model reads samples of the policy; None: by their token ids.

    Raises:
        ValueError: a tokenizer is missing or cannot be read; names the folder.
    """
    if policy is None or (
        not other_token(policy, model)
        and not other_token(model, policy)
        and chat_template(policy) == chat_template(model)
    ):
        return None
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    theirs, own = (
        load(folder, local_files_only=True, trust_remote_code=False) for folder in (policy, model)
    )
    return OwnText(theirs, own, _render(policy), _render(model) if chat_template(model) else None)


@dataclass(frozen=True, slots=True)
class OwnText:
    """Tokenizers and chat templates of a policy and of a reward model."""

    policy: Any
    model: Any
    render_policy: Render
    render_model: Render | None

    def own_ids(self, token_ids_T: NDArray[np.int32]) -> NDArray[np.int32]:  # noqa: N803
        """The reward model's token ids of what the policy's say."""
        ids = token_ids_T.tolist()
        text = self._rendered(self.policy.decode(ids, skip_special_tokens=False))
        if text is None:
            own = self.model(self.policy.decode(ids, skip_special_tokens=True))["input_ids"]
        else:  # a template writes the special tokens itself
            own = self.model(text, add_special_tokens=False)["input_ids"]
        return np.array(own, np.int32)

    def _rendered(self, text: str) -> str | None:
        """The policy's text by the model's template; None: there is none, or it refuses it."""
        if self.render_model is None:
            return None
        messages = messages_of(text, self.render_policy)
        try:
            return None if messages is None else self.render_model(messages)
        except RenderError:  # such as one without system messages
            return None


def messages_of(text: str, render: Render) -> list[Message] | None:
    """The messages that a chat template rendered to a text; None: they are not found again."""
    for roles in (_ROLES[1:], _ROLES):  # a template may write a system message itself
        contents = [f"mark-{uuid.uuid4().hex}" for _ in roles]
        try:
            rendered = render(_messages(roles, contents))
            between = re.split("|".join(contents), rendered)
            found = _split(text, roles, between) if len(between) == len(roles) + 1 else None
            if found is not None and _starts_alike(text, render(found)):
                return found
        except RenderError:  # such as a template without a system message
            continue
    return None


def _split(text: str, roles: Sequence[str], between: Sequence[str]) -> list[Message] | None:
    """Cut a text at what stands between messages of a conversation of any length."""
    begin, *first, after_answer, _, end = between
    if not text.startswith(begin):
        return None
    rest, contents = text[len(begin) :], list[str]()
    for separator in itertools.chain(first, itertools.cycle((after_answer, first[-1]))):
        content, cut, rest = rest.partition(separator)
        contents.append(content)
        if not cut:
            break
    contents[-1] = contents[-1].removesuffix(end).removesuffix(end.rstrip())
    later = itertools.cycle(("user", "assistant"))
    turns = itertools.chain(roles[: len(roles) - 4], later)
    return _messages(list(itertools.islice(turns, len(contents))), contents)


def _starts_alike(text: str, rendered: str) -> bool:
    """Whether both are the same but for what the template writes after the last answer."""
    return bool(text.strip()) and rendered.rstrip().startswith(text.rstrip())


def _messages(roles: Sequence[str], contents: Sequence[str]) -> list[Message]:
    pairs = zip(roles, contents, strict=True)
    return [{"role": role, "content": content} for role, content in pairs]


def _render(folder: Path) -> Render:
    source, variables = chat_template(folder), template_variables(folder)

    def render(messages: Sequence[Message]) -> str:
        if not source:
            raise RenderError("there is no chat template")
        return shared_renderer(RenderLimits()).render(source, messages, variables=variables)

    return render
