"""A reward model: Hugging Face's sequence classification with one label.

It reads the policy's token ids, or their text where its tokenizer or chat template is another.

Shape suffixes: B rows of a forward pass, T tokens.
"""

from __future__ import annotations

import itertools
import re
import uuid

# ruff: noqa: N806 -- tensors carry shape suffixes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.lib.model_files.end_ids import chat_template, template_variables
from services.lib.model_files.model_folder import other_token
from services.lib.rendering.renderer import RenderError, RenderLimits, shared_renderer
from services.lib.transformer.can_pack import can_pack
from services.lib.transformer.packing import Packing
from services.lib.transformer.row_rope import row_rope
from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row, prefix_batches, token_ids
from services.scoring.scorers.loading import load_frozen

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]
_ROLES = ("system", "user", "assistant", "user", "assistant")


class RewardModel:
    """Scores the whole sequence with one value."""

    def __init__(self, config: ScoringConfig) -> None:
        from transformers import AutoModelForSequenceClassification

        model: Any = load_frozen(config, AutoModelForSequenceClassification)
        self._model = model
        self._device, self._max_tokens = config.device, config.micro_batch_tokens
        # One sequence at a time has no padding, and may end with the padding token.
        model.config.pad_token_id = None
        num_labels = model.config.num_labels
        if num_labels != 1:
            raise ValueError(f"model {config.model}: has {num_labels} labels, a reward model has 1")
        has_head = hasattr(model, "score")
        self._text = own_text(config.policy_model, config.model)
        row_rope(model)  # what was scored before must not change a row
        self._packs = config.packing and has_head and can_pack(model, self._outputs)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> Sequence[NDArray[np.float32]]:
        """One value per row; without packing each row alone, as models handle padding variously."""
        if self._text is not None:
            own = map(self._text.own_ids, (row.token_ids_T for row in rows))
            rows = [replace(row, token_ids_T=ids_T) for row, ids_T in zip(rows, own, strict=True)]
        if not self._packs:
            return [np.array([self._score(row)], np.float32) for row in rows]
        values: dict[int, float] = {}
        for numbers in prefix_batches(rows, self._max_tokens):
            values |= zip(numbers, self._packed([rows[n] for n in numbers]), strict=True)
        return [np.array([values[number]], np.float32) for number in range(len(rows))]

    def _packed(self, rows: Sequence[Row]) -> list[float]:
        ids_BT, lengths_B = token_ids(rows)
        packing = Packing.of(ids_BT, lengths_B, self._device)
        last = torch.from_numpy(lengths_B[:, None] - 1).to(self._device)
        last_B = packing.places_BT.gather(1, last)[:, 0]
        found: list[float] = self._outputs(**packing.arguments, logits_to_keep=last_B)[
            0, :, 0
        ].tolist()
        return found

    def _outputs(
        self, *, logits_to_keep: torch.Tensor | slice = slice(None), **arguments: Any
    ) -> torch.Tensor:
        states_BTH = self._model.base_model(**arguments).last_hidden_state
        scores: torch.Tensor = self._model.score(states_BTH[:, logits_to_keep])
        return scores

    def _score(self, row: Row) -> float:
        ids_BT = torch.from_numpy(row.token_ids_T.astype(np.int64))[None].to(self._device)
        return float(self._model(input_ids=ids_BT, use_cache=False).logits[0, 0])


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
