"""Drift is other ids for the same text; another text is a rewritten history."""

from __future__ import annotations

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from bench.harness.byte_model import END, make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import find_drift
from services.lib.token_bytes import pack_ids


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """Byte-level, with a few merges."""
    return ChatTemplate(make_byte_model(tmp_path_factory.mktemp("model")))


def ids(template: ChatTemplate, text: str, *, pieces: bool = False) -> list[int]:
    """The tokenizer's own ids of a text, or one for each byte."""
    parts = list(text) if pieces else [text]
    return [token_id for part in parts for token_id in template.encode_text(part)]


def drift(
    template: ChatTemplate, before: str, recorded: list[int], given: list[int]
) -> tokens_pb2.Drift | None:
    """Compare what follows `before` in the record with what follows it in the prompt."""
    start = ids(template, before)
    same = next((i for i, (a, b) in enumerate(zip(recorded, given, strict=False)) if a != b), 0)
    lost = pack_ids(recorded[same : same + 64])
    divergence = store_pb.Divergence(turn_id="t", position=len(start) + same, token_ids=lost)
    return find_drift(template, start + given, divergence)


def test_other_ids_for_the_same_text_are_drift(template: ChatTemplate) -> None:
    """Sampled letter by letter, encoded again as words, followed by the next message."""
    sampled = ids(template, "say hello", pieces=True)
    again = ids(template, f"say hello{END}<user>more")
    found = drift(template, "<assistant>", sampled, again)
    assert found is not None
    assert found.position == len(ids(template, "<assistant>say "))
    assert found.recorded_text == "hello"
    assert found.retokenized_text == f"hello{END}<user>more"


@pytest.mark.parametrize("text", ["hey hello", "say hallo", "say he", "other", "say hello!"])
def test_another_text_is_no_drift(template: ChatTemplate, text: str) -> None:
    """Negative control: a rewritten answer is never called drift, however close it is."""
    sampled = ids(template, f"say hello{END}", pieces=False)
    sampled[4:5] = ids(template, "hello", pieces=True)
    assert template.text(sampled) == f"say hello{END}"
    rewritten = ids(template, f"{text}{END}<user>more")
    assert drift(template, "<assistant>", sampled, rewritten) is None


def test_a_prompt_may_end_before_the_record_does(template: ChatTemplate) -> None:
    """Best of n from the middle of an answer, encoded again."""
    found = drift(template, "so ", ids(template, "hello you", pieces=True), ids(template, "hello"))
    assert found is not None
    assert (found.recorded_text, found.retokenized_text) == ("hello you", "hello")


def test_a_character_may_be_cut(template: ChatTemplate) -> None:
    """64 recorded bytes end inside a character, and the difference begins inside another."""
    euro = ids(template, "€")
    assert len(euro) == 3
    recorded = [*ids(template, "hello", pieces=True), *euro * 30]
    found = drift(template, "costs ", recorded, ids(template, "hello" + "€" * 30))
    assert found is not None
    assert found.recorded_text == "hello" + "€" * 19
    assert drift(template, "costs ", recorded, ids(template, "hello" + "€" * 18 + "$")) is None


def test_a_lost_terminator_is_no_drift(template: ChatTemplate) -> None:
    """Special tokens count: without them another history was encoded."""
    recorded = ids(template, f"hello{END}", pieces=False)
    assert drift(template, "", recorded, ids(template, "hello<user>")) is None


def test_texts_are_cut(template: ChatTemplate) -> None:
    """At 200 characters, however long the prompt is."""
    found = drift(template, "", ids(template, "hello", pieces=True), ids(template, "hello" * 300))
    assert found is not None
    assert len(found.retokenized_text) == 200
