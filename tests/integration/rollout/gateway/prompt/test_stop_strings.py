"""Stop strings and increments of text, whatever the tokens are cut into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness.byte_model import END, make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.token_text import StopStrings, TextStream
from tests.suites.roundtrips.families import FAMILIES


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """Byte-level, with a few merges."""
    return ChatTemplate(make_byte_model(tmp_path_factory.mktemp("model")))


def letters(template: ChatTemplate, text: str) -> list[int]:
    """One id for each byte of the text's letters."""
    return [token_id for letter in text for token_id in template.encode_text(letter)]


@given(text=st.text("helo wörld€😀", max_size=20), cuts=st.lists(st.integers(1, 4), min_size=1))
def test_increments_are_the_whole_text(template: ChatTemplate, text: str, cuts: list[int]) -> None:
    """Nothing is doubled, lost or cut within a character."""
    ids = letters(template, text)
    stream, parts, start, number = TextStream(template), list[str](), 0, 0
    while start < len(ids):
        size = cuts[number % len(cuts)]
        parts.append(stream.push(ids[start : start + size]))
        start, number = start + size, number + 1
    assert "".join(parts) == template.text(ids) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_half_a_character_at_the_end_is_sent(template: ChatTemplate) -> None:
    """The turn's budget may cut it."""
    ids = letters(template, "a€")[:-1]
    stream = TextStream(template)
    assert stream.push(ids) == "a"
    assert stream.push([], last=True) == template.text(ids)[1:]


@pytest.fixture(scope="module")
def falling_back(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """Letters, and bytes for those that have no token; a run of bytes is decoded as one."""
    folder = tmp_path_factory.mktemp("letters")
    return ChatTemplate(FAMILIES["hermes"].make_model(folder, falls_back=True))


@given(data=st.data())
def test_runs_of_bytes_are_sent_when_they_are_whole(
    falling_back: ChatTemplate, data: st.DataObject
) -> None:
    """A broken character changes how the bytes before it are decoded."""
    text = data.draw(st.text("he wö€😀数学", min_size=12, max_size=40))
    ids = falling_back.encode_text(text)
    if data.draw(st.booleans()):
        del ids[data.draw(st.integers(0, len(ids) - 1))]
    stream, parts, start = TextStream(falling_back), list[str](), 0
    while start < len(ids):
        end = start + data.draw(st.integers(1, 4))
        parts.append(stream.push(ids[start:end], last=end >= len(ids)))
        start = end
    assert "".join(parts) == falling_back.text(ids)


def test_a_stop_string_is_found_within_a_run_of_bytes(falling_back: ChatTemplate) -> None:
    """Also where the chunk ends within the next character, and the run began long before."""
    before = falling_back.encode_text("数学" * 10 + "终")
    ids = [*before, *falling_back.encode_text("学")[:2]]
    stops = StopStrings(falling_back, ["终"])
    assert stops.num_until_stop(ids, 3) == len(before) - 3
    assert stops.ends_with_stop(before)
    assert not stops.ends_with_stop(before[:-1])


@pytest.mark.parametrize("start", range(0, 9))
def test_the_first_stop_string_is_found_in_any_chunk(template: ChatTemplate, start: int) -> None:
    """Up to the token that completes it, wherever the chunk began before."""
    ids = letters(template, "say STOP now")
    end = len(letters(template, "say STOP"))
    stops = StopStrings(template, ["now", "STOP"])
    if start < end:
        assert stops.num_until_stop(ids, start) == end - start
    assert stops.ends_with_stop(ids[:end])
    assert not stops.ends_with_stop(ids[: end - 1])
    assert stops.found(ids) == "STOP"


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("before", [0, 4, 9])
def test_chunks_in_a_row_find_what_the_whole_has(
    falling_back: ChatTemplate, size: int, before: int
) -> None:
    """Whatever a chunk ends in, and for a turn that continues from recorded tokens."""
    ids = falling_back.encode_text("数学 say 终 now STOP and on")
    whole = StopStrings(falling_back, ["终", "STOP"]).num_until_stop(ids, before)
    stops, start = StopStrings(falling_back, ["终", "STOP"], ids[:before]), before
    while (number := stops.num_until_next(ids[start : start + size])) is None:
        start += size
        assert start < len(ids)
    assert start + number - before == whole


def test_long_answers_are_not_looked_at_again(template: ChatTemplate) -> None:
    """What is kept of an answer for the next chunk has a bound, whatever its length."""
    stops, ids = StopStrings(template, ["STOP", "never", "x" * 50]), letters(template, "a b ") * 500
    kept = set()
    for start in range(0, len(ids), 8):
        assert stops.num_until_next(ids[start : start + 8]) is None
        kept.add(len(stops._tail))
    assert max(kept) <= 50 + 8


def test_a_stop_string_may_cross_chunks(template: ChatTemplate) -> None:
    """Its beginning came with an earlier chunk."""
    ids = letters(template, "say STOP now")
    stops = StopStrings(template, ["STOP"])
    assert stops.num_until_stop(ids[:6], 3) is None
    assert stops.num_until_stop(ids, 6) == 2


@pytest.mark.parametrize("stop", [END, "end", "<", "|>", ">now"])
def test_special_tokens_are_no_text(template: ChatTemplate, stop: str) -> None:
    """Neither whole, nor in part, nor together with text beside them; their text as text counts."""
    ids = [*letters(template, "hi"), *template.stop_token_ids, *letters(template, "now")]
    stops = StopStrings(template, [stop])
    assert stops.num_until_stop(ids, 0) is None
    assert stops.found(ids) is None
    assert stops.text_before(ids) == f"hi{END}now"
    written = letters(template, f"hi{END[:-1]}") + letters(template, ">now")
    assert stops.found(written) == stop


def reference(template: ChatTemplate, stops: list[str], ids: list[int]) -> tuple[int | None, str]:
    """Token by token: how many it takes to a stop string, and the text before it."""
    start = 0
    for number in range(1, len(ids) + 1):
        if ids[number - 1] in template.marker_ids:
            start = number
        text = template.text(ids[start:number])
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return number, template.text(ids[:start]) + text[: min(found)]
    return None, template.text(ids)


@given(data=st.data(), falls_back=st.booleans())
def test_any_chunks_find_what_single_tokens_have(
    template: ChatTemplate, falling_back: ChatTemplate, data: st.DataObject, falls_back: bool
) -> None:
    """Whatever a character is cut into, and with special tokens anywhere."""
    model = falling_back if falls_back else template
    text = data.draw(st.text("he wö€😀数学<|end>", min_size=1, max_size=30))
    place = data.draw(st.integers(0, len(text)))
    marker = data.draw(st.sampled_from([[], [min(model.stop_token_ids)]]))
    ids = [*model.encode_text(text[:place]), *marker, *model.encode_text(text[place:])]
    parts = st.builds(
        lambda i, n: text[i : i + n], st.integers(0, len(text) - 1), st.integers(1, 5)
    )
    stops = data.draw(st.lists(parts | st.just("end") | st.just("|>"), min_size=1, max_size=3))
    number, before = reference(model, stops, ids)
    strings, start = StopStrings(model, stops), 0
    found = None
    while start < len(ids) and found is None:
        end = start + data.draw(st.integers(1, 9))
        found = strings.num_until_next(ids[start:end])
        found, start = None if found is None else start + found, end
    assert found == number
    assert strings.text_before(ids) == before


def test_without_stop_strings_nothing_stops(template: ChatTemplate) -> None:
    """Control."""
    stops = StopStrings(template, [])
    ids = letters(template, "say STOP")
    assert stops.num_until_stop(ids, 0) is None
    assert not stops.ends_with_stop(ids)
    assert stops.found(ids) is None
