"""Sampled ids are never encoded again; what follows them is, and fits exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.conversation import Conversation, message_keys
from services.chassis.errors import ConfigError

WORDS = "system user assistant tool hello what is the answer four eight twice <think> </think> so"
START, END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<unk>"
HEAD = "<|im_start|>{{ m.role }} "
ASK = "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
CHATML = "{% for m in messages %}" + HEAD + "{{ m.content }}<|im_end|> {% endfor %}" + ASK
"""Appends only."""
FORGETFUL = (
    "{% for m in messages %}" + HEAD + "{{ m.content if loop.last else "
    "m.content.split('</think> ')[-1] }}<|im_end|> {% endfor %}" + ASK
)
"""Drops the thinking of earlier answers."""

QUESTION = {"role": "user", "content": "what is the answer"}
ANSWER = {"role": "assistant", "content": "the answer is four"}
AGAIN = {"role": "user", "content": "twice"}
THOUGHT = {"role": "assistant", "content": "<think> so four </think> four"}


def make_model(folder: Path, chat_template: str | None = CHATML, words: str = WORDS) -> Path:
    """A folder with a word-level tokenizer and this template."""
    vocabulary = {word: i for i, word in enumerate([UNKNOWN, START, END, *words.split()])}
    words_of = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words_of.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words_of,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    """The template that appends only."""
    return ChatTemplate(make_model(tmp_path))


def talk(messages: Sequence[Mapping[str, Any]], **options: Any) -> Conversation:
    """A conversation of these messages."""
    return Conversation(messages, **options)


def ids_of(template: ChatTemplate, text: str) -> list[int]:
    """Ids that the policy samples for `text`."""
    return template.encode(talk([{"role": "user", "content": text}]))[2:-3]


def test_the_vocabulary_is_known(template: ChatTemplate) -> None:
    """The words of these tests are one token each."""
    assert len(ids_of(template, "the answer is four")) == 4
    assert template.vocabulary_size == 3 + len(WORDS.split())


def test_what_follows_a_sampled_terminator_completes_the_whole(template: ChatTemplate) -> None:
    """prompt + sampled + rest is the encoding of the whole conversation."""
    end = template.encode(talk([QUESTION]))
    (stop,) = template.stop_token_ids
    sampled = [*ids_of(template, ANSWER["content"]), stop]
    rest = template.encode_after(talk([QUESTION, ANSWER, AGAIN]), 2, sampled[-1]) or []
    assert end + sampled + rest == template.encode(talk([QUESTION, ANSWER, AGAIN]))
    assert stop not in rest[:1]


def test_a_missing_terminator_is_added(template: ChatTemplate) -> None:
    """An answer cut by its budget: the terminator is the first environment token."""
    sampled = ids_of(template, ANSWER["content"])
    rest = template.encode_after(talk([QUESTION, ANSWER, AGAIN]), 2, sampled[-1]) or []
    assert rest[0] in template.stop_token_ids
    whole = template.encode(talk([QUESTION])) + sampled + rest
    assert whole == template.encode(talk([QUESTION, ANSWER, AGAIN]))


def test_a_last_word_that_the_next_message_repeats_is_no_terminator(tmp_path: Path) -> None:
    """Only special tokens count as sampled terminators."""
    bare = "{% for m in messages %}{{ m.content }} {% endfor %}"
    template = ChatTemplate(make_model(tmp_path, bare))
    last = template.encode(talk([{"role": "user", "content": "twice"}]))[-1]
    conversation = [QUESTION, {"role": "assistant", "content": "twice"}, AGAIN]
    assert template.encode_after(talk(conversation), 2, last) == [last]


def test_sampled_ids_need_not_be_what_the_tokenizer_would_make(template: ChatTemplate) -> None:
    """What follows depends on the text's end only, so unusual ids stay as they were sampled."""
    (stop,) = template.stop_token_ids
    rest = template.encode_after(talk([QUESTION, ANSWER, AGAIN]), 2, stop)
    assert rest == template.encode_after(
        talk([QUESTION, {**ANSWER, "content": "so"}, AGAIN]), 2, stop
    )


def test_history_that_only_grows_is_append_only(template: ChatTemplate) -> None:
    """ChatML keeps every answer, thinking included."""
    assert template.keeps_history(talk([QUESTION]))
    assert template.keeps_history(talk([QUESTION, ANSWER, AGAIN]))
    assert template.keeps_history(talk([QUESTION, THOUGHT, AGAIN, ANSWER, AGAIN]))


def test_history_that_is_rewritten_is_noticed(tmp_path: Path) -> None:
    """A template that drops old thinking is append-only just as long as there is none."""
    template = ChatTemplate(make_model(tmp_path, FORGETFUL))
    assert template.keeps_history(talk([QUESTION, ANSWER, AGAIN]))
    assert not template.keeps_history(talk([QUESTION, THOUGHT, AGAIN]))
    # Recorded tokens may be kept all the same (history = "as_sampled").
    assert template.encode_after(talk([QUESTION, THOUGHT, AGAIN]), 2, 0) is not None


def test_rewritten_history_would_give_other_ids(tmp_path: Path) -> None:
    """Negative control: gluing the sampled thinking to the new prompt is not what is rendered."""
    template = ChatTemplate(make_model(tmp_path, FORGETFUL))
    (stop,) = template.stop_token_ids
    whole = template.encode(talk([QUESTION, THOUGHT, AGAIN]))
    kept = [*template.encode(talk([QUESTION])), *ids_of(template, THOUGHT["content"]), stop]
    assert whole[: len(kept)] != kept


def test_decoding_leaves_special_tokens_out(template: ChatTemplate) -> None:
    """An agent reads words."""
    (stop,) = template.stop_token_ids
    answer = template.parse([*ids_of(template, "hello four"), stop], None, None)
    assert answer.message["content"] == "hello four ", "with the space of its last word"


def test_keys_tell_role_and_text_apart() -> None:
    """Equal keys mean equal messages."""
    keys = message_keys([QUESTION, {**QUESTION, "role": "tool"}, AGAIN, QUESTION])
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3


def test_the_fingerprint_follows_template_and_vocabulary(tmp_path: Path) -> None:
    """Whatever could give other ids gives another fingerprint."""
    variants = {"a": {}, "b": {}, "c": {"chat_template": FORGETFUL}, "d": {"words": WORDS + " x"}}
    a, b, c, d = (
        ChatTemplate(make_model(tmp_path / name, **options)).fingerprint
        for name, options in variants.items()
    )
    assert a == b
    assert len({a, c, d}) == 3


@pytest.mark.parametrize("given", [3, [3, 4], None])
def test_stop_ids_are_those_that_engines_use(given: int | list[int] | None, tmp_path: Path) -> None:
    """The tokenizer's end of sequence and those of generation_config.json."""
    folder = make_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    more = {3, 4} if isinstance(given, list) else {given} - {None}
    assert ChatTemplate(folder).stop_token_ids == {2} | more


def test_a_folder_without_tokenizer_names_the_cure(tmp_path: Path) -> None:
    """A model saved without its tokenizer, of a kind that transformers makes an empty one for."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.save_pretrained"):
        ChatTemplate(tmp_path)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    """A wrong path."""
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ChatTemplate(tmp_path / "nowhere")


def test_checking_a_conversation_turn_by_turn_is_linear(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn renders a few prompts, however many there were before; cold, some more."""
    rendered: list[int] = []
    render = template.render

    def counted(conversation: Conversation, *, add_prompt: bool = True) -> str:
        rendered.append(len(conversation.messages))
        return render(conversation, add_prompt=add_prompt)

    monkeypatch.setattr(template, "render", counted)
    messages = [QUESTION]
    for _ in range(20):
        assert template.keeps_history(talk(messages))
        messages += [ANSWER, AGAIN]
    assert len(rendered) == 1 + 3 * 19
    template._kept.clear()
    rendered.clear()
    assert template.keeps_history(talk(messages))
    assert len(rendered) == 1 + 2 * 8 + 3  # the oldest twelve by three of the whole


def test_what_was_append_only_may_be_rewritten_later(tmp_path: Path) -> None:
    """What is known of a shorter conversation does not hide what a longer one forgets."""
    template = ChatTemplate(make_model(tmp_path, FORGETFUL))
    assert template.keeps_history(talk([QUESTION]))
    assert template.keeps_history(talk([QUESTION, ANSWER, AGAIN]))
    assert not template.keeps_history(talk([QUESTION, ANSWER, AGAIN, THOUGHT, AGAIN]))
    assert not template.keeps_history(talk([QUESTION, THOUGHT, AGAIN, ANSWER, AGAIN]))
