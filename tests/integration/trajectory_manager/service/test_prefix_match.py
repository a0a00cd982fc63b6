"""Matching: prompts continue the longest stored prefix, at a cost linear in what is new."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.chassis.errors import Reason
from services.lib.token_bytes import unpack_ids
from tests.lib.trajectory_manager.support import Run, policy, refused, tokens
from trajectory_manager.model.prefix_tree import message_keys
from trajectory_manager.model.tokens import Tokens, Turn
from trajectory_manager.service import prefix_match
from trajectory_manager.store.redis import codec


@dataclass(slots=True)
class Counting:
    """A token store that counts the bytes which its readers read."""

    store: Any
    num_bytes: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def turns(self, run_id: str, rollout_id: str) -> list[Turn]:
        """Counts begins as they are written in Redis."""
        found: list[Turn] = await self.store.turns(run_id, rollout_id)
        self.num_bytes += sum(len(codec.begin_text(turn)) for turn in found)
        return found

    async def newest_turn(self, run_id: str, rollout_id: str) -> Turn | None:
        """Counts the begin and the tokens."""
        found: Turn | None = await self.store.newest_turn(run_id, rollout_id)
        if found is not None:
            self.num_bytes += len(codec.begin_text(found))
            self.num_bytes += size(found.tokens)
        return found

    async def tokens(self, run_id: str, rollout_id: str, turn_ids: Sequence[str]) -> list[Tokens]:
        """Counts the tokens."""
        found: list[Tokens] = await self.store.tokens(run_id, rollout_id, turn_ids)
        self.num_bytes += sum(map(size, found))
        return found


def size(read: Tokens) -> int:
    """Bytes of ids and log-probs."""
    return len(read.ids) + len(read.logprobs)


GROWN_DIGITS = 16
"""Lengths in an begin are written in decimal."""


async def bytes_read(run: Run) -> list[int]:
    """What each turn of an append-only conversation of ids reads from the store."""
    counting: Any = Counting(run.store.tokens)
    run.store = replace(run.store, tokens=counting)
    await run.start("r")
    prompt, read = [1_000_000], []
    for number in range(100, 150):
        counting.num_bytes = 0
        opened = await run.turn("r", f"t{number}", prompt, [number] * 20)
        assert len(opened.prefix_token_ids) == 4 * (len(prompt) - 1)
        read.append(counting.num_bytes)
        prompt += [*[number] * 20, 1_000_000 + number]
    return read


async def test_reads_and_storage_do_not_grow_with_the_turns(run: Run) -> None:
    """Every turn of an append-only conversation reads and stores as much as the third one."""
    read = await bytes_read(run)
    assert max(read[2:]) <= read[2] + GROWN_DIGITS
    turns = await run.store.tokens.turns(run.run_id, "r")
    sizes = [len(codec.begin_text(turn)) for turn in turns]
    assert max(sizes) <= sizes[1] + GROWN_DIGITS
    stored = await run.store.tokens.tokens(run.run_id, "r", [turn.turn_id for turn in turns])
    assert {own.num_tokens for own in stored} == {21}


async def test_without_digests_of_prompts_reads_would_grow(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: where every turn has to be compared, the last one reads all of them."""
    monkeypatch.setattr(prefix_match, "_claims", lambda turns, ids: {})
    read = await bytes_read(run)
    assert read[-1] > 10 * read[1]


async def test_message_keys_are_stored_once(run: Run) -> None:
    """Fifty turns of messages store one key per message, and each turn still knows them all."""
    await run.start("r")
    conversation: list[str] = ["system"]
    for number in range(50):
        conversation.append(f"user-{number}")
        opened = await run.begin("r", f"t{number}", conversation)
        expected = len(conversation) - 1 if number else 0
        assert opened.num_matched_messages == expected
        new = tokens([number, number], policy())
        await run.append("r", f"t{number}", opened.epoch, 0, new)
        await run.end("r", f"t{number}", opened.epoch, f"answer-{number}")
        conversation.append(f"answer-{number}")
        assert list(unpack_ids(opened.prefix_token_ids)) == [
            n for n in range(number) for _ in (0, 1)
        ]
    turns = await run.store.tokens.turns(run.run_id, "r")
    assert sum(len(turn.new_message_keys) for turn in turns) == 51
    whole = message_keys(turns)
    assert [len(whole[turn.turn_id]) for turn in turns] == list(range(3, 103, 2))
    assert list(whole["t49"]) == conversation


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_matched_is_stored_and_the_longest(run: Run, seed: int) -> None:
    """Turns that continue, fork anywhere, repeat and start anew: no stored prefix is longer."""
    dice = random.Random(seed)
    fresh = itertools.count(1)
    await run.start("r")
    sequences: list[list[int]] = [[]]
    for number in range(12):
        base = dice.choice([*sequences, *sequences[-2:]])
        kept = dice.choice([len(base), len(base), dice.randint(0, len(base))])
        new = [next(fresh) for _ in range(dice.randint(0, 3))]
        prompt = base[:kept] + new or [next(fresh)]
        opened = await run.turn(
            "r", f"t{number}", prompt, [next(fresh) for _ in range(dice.randint(1, 4))]
        )
        prefix = list(unpack_ids(opened.prefix_token_ids))
        assert prefix == prompt[: len(prefix)]
        assert len(prefix) == max(shared(prompt, stored) for stored in sequences)
        sequences.append(await sequence(run, f"t{number}"))


async def sequence(run: Run, turn_id: str) -> list[int]:
    """The whole sequence of a turn, from what is stored."""
    turns = {turn.turn_id: turn for turn in await run.store.tokens.turns(run.run_id, "r")}
    (own,) = await run.store.tokens.tokens(run.run_id, "r", [turn_id])
    turn = turns[turn_id]
    before = await sequence(run, turn.prefix_turn_id) if turn.prefix_turn_id else []
    return [*before[: turn.prefix_length], *unpack_ids(own.ids)]


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


async def test_samples_of_one_prompt_are_distinguished(run: Run) -> None:
    """Of turns opened together with the same prompt, the one whose answer follows is continued."""
    await run.start("r")
    epochs = [(await run.begin("r", f"t{n}", [1, 2])).epoch for n in range(4)]
    for n, epoch in enumerate(epochs):
        await run.append("r", f"t{n}", epoch, 0, tokens([1, 2]))
        await run.append("r", f"t{n}", epoch, 2, tokens([7, n], policy()))
        await run.end("r", f"t{n}", epoch)
    opened = await run.begin("r", "u", [1, 2, 7, 1, 5])
    assert (opened.prefix_turn_id, len(opened.prefix_token_ids)) == ("t1", 16)


async def test_a_running_turn_is_continued_as_far_as_it_is_stored(run: Run) -> None:
    """A turn whose prompt is not stored yet shares only what it shared when it began."""
    await run.start("r")
    await run.turn("r", "t1", [1, 2], [3])
    await run.begin("r", "t2", [1, 2, 3, 4])
    opened = await run.begin("r", "t3", [1, 2, 3, 4])
    assert (opened.prefix_turn_id, len(opened.prefix_token_ids)) == ("t1", 12)


async def test_what_was_recorded_counts_not_what_was_asked(run: Run) -> None:
    """A writer that stored other tokens than its prompt is matched by what it stored."""
    await run.start("r")
    epoch = (await run.begin("r", "t1", [1, 2, 3])).epoch
    await run.append("r", "t1", epoch, 0, tokens([1, 9]))
    await run.end("r", "t1", epoch)
    opened = await run.begin("r", "t2", [1, 2, 3, 4])
    assert list(unpack_ids(opened.prefix_token_ids)) == [1]


async def test_a_repeated_begin_answers_as_the_first(run: Run) -> None:
    """Prefix and divergence are the same for the attempt that takes the turn over."""
    await run.start("r")
    await run.turn("r", "t1", [1, 2], [3, 4, 5])
    first = await run.begin("r", "t2", [1, 2, 3, 9, 9])
    await run.turn("r", "t3", [1, 2, 3, 9, 9, 9], [7])
    again = await run.begin("r", "t2", [1, 2, 3, 9, 9], "other")
    assert (again.prefix_token_ids, again.divergence) == (first.prefix_token_ids, first.divergence)
    assert again.epoch == first.epoch + 1


async def test_leaving_sampled_tokens_is_a_divergence(run: Run) -> None:
    """It names the turn, the position and the sampled ids from there on, up to their end."""
    await run.start("r")
    await run.turn("r", "t1", [1, 2], [3, 4, 5])
    await run.turn("r", "t2", [1, 2, 3, 4, 5, 6], list(range(100, 200)))
    opened = await run.begin("r", "u", [1, 2, 3, 4, 5, 6, 100, 101, 9])
    assert opened.HasField("divergence")
    assert (opened.divergence.turn_id, opened.divergence.position) == ("t2", 8)
    assert list(unpack_ids(opened.divergence.token_ids)) == list(range(102, 166))
    early = await run.begin("r", "v", [1, 2, 3, 9])
    assert early.HasField("divergence")
    assert (early.divergence.turn_id, early.divergence.position) == ("t1", 3)
    assert list(unpack_ids(early.divergence.token_ids)) == [4, 5]


@pytest.mark.parametrize(
    "prompt",
    [[1, 9], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3], [1, 2, 3, 4, 5, 8], [8]],
    ids=["in the prompt", "all", "beyond", "a part", "in a later prompt", "nothing shared"],
)
async def test_everything_else_is_no_divergence(run: Run, prompt: list[int]) -> None:
    """Forks in environment tokens, and prompts that end or continue where the record does."""
    await run.start("r")
    await run.turn("r", "t1", [1, 2], [3, 4, 5])
    await run.turn("r", "t2", [1, 2, 3, 4, 5, 6], [])
    assert not (await run.begin("r", "u", prompt)).HasField("divergence")


async def test_messages_have_no_divergence(run: Run) -> None:
    """Their recorded ids are used as they are."""
    await run.start("r")
    opened = await run.begin("r", "t1", ["user"])
    await run.append("r", "t1", opened.epoch, 0, tokens([3], policy()))
    await run.end("r", "t1", opened.epoch, "answer")
    for name, answer in (("t2", "answer"), ("t3", "other")):
        begun = await run.begin("r", name, ["user", answer, "more"])
        assert not begun.HasField("divergence")


async def answered(run: Run, turn_id: str, prompt: list[str], answer: str, parent: str = "") -> str:
    """A turn of messages with one sampled token; the turn it continues."""
    opened = await run.begin("r", turn_id, prompt, parent=parent)
    await run.append("r", turn_id, opened.epoch, 0, tokens([len(prompt)], policy()))
    await run.end("r", turn_id, opened.epoch, answer)
    return str(opened.prefix_turn_id)


@pytest.mark.parametrize(
    ("echoed", "prefix"),
    [
        ("a1", "t1"),
        ("a1:r1", "t1"),
        ("a1:r2", ""),
        ("a2:r1", ""),
    ],
)
async def test_an_echo_matches_with_or_without_its_reasoning(
    run: Run, echoed: str, prefix: str
) -> None:
    """Without it any reasoning matches; with it only the same."""
    await run.start("r")
    await answered(run, "t1", ["user"], "a1:r1")
    assert await answered(run, "t2", ["user", echoed, "more"], "a2:r2") == prefix


@pytest.mark.parametrize(
    ("first", "second", "prefix"),
    [
        ("a1", "a2", "t2"),
        ("a1:r1", "a2:r2", "t2"),
        ("a1", "a2:r2", "t2"),
        ("a1:r9", "a2:r2", ""),
        ("a1:r9", "a2", ""),
        ("a1:r1", "a2:r9", "t1"),
    ],
)
async def test_all_answers_on_the_path_are_checked(
    run: Run, first: str, second: str, prefix: str
) -> None:
    """Also where the turn before was given its own echo without the reasoning."""
    await run.start("r")
    await answered(run, "t1", ["user"], "a1:r1")
    assert await answered(run, "t2", ["user", "a1", "more"], "a2:r2") == "t1"
    assert await answered(run, "t3", ["user", first, "more", second, "go"], "a3") == prefix


async def test_a_prompt_that_drops_reasoning_is_the_same_prompt(run: Run) -> None:
    """A repeated turn may echo with it or without."""
    await run.start("r")
    await answered(run, "t1", ["user"], "a1:r1")
    first = await run.begin("r", "t2", ["user", "a1:r1", "more"])
    again = await run.begin("r", "t2", ["user", "a1", "more"])
    assert again == first


async def test_an_answer_without_reasoning_has_none(run: Run) -> None:
    """An echo with reasoning is another answer."""
    await run.start("r")
    await answered(run, "t1", ["user"], "a1")
    assert await answered(run, "t2", ["user", "a1:r1", "more"], "a2") == ""
    assert await answered(run, "t3", ["user", "a1", "more"], "a3") == "t1"


async def test_a_sub_agent_keeps_its_parent(run: Run) -> None:
    """Its prompt continues nothing: it is a root, and its own turns continue it."""
    await run.start("r")
    await answered(run, "main", ["user"], "a1")
    opened = await run.begin("r", "sub", ["task"], parent="main")
    assert (opened.prefix_turn_id, opened.prefix_token_ids) == ("", b"")
    await run.append("r", "sub", opened.epoch, 0, tokens([7], policy()))
    await run.end("r", "sub", opened.epoch, "s1")
    assert await answered(run, "sub-2", ["task", "s1", "go"], "s2", parent="sub") == "sub"
    found = {turn.turn_id: turn for turn in await run.store.tokens.turns(run.run_id, "r")}
    assert found["sub"].parent_turn_id == "main"
    assert found["sub-2"].parent_turn_id == "sub"


async def test_with_a_parent_only_its_path_is_matched(run: Run) -> None:
    """An ancestor of the parent is, another branch is not, however much it shares."""
    await run.start("r")
    await answered(run, "t1", ["user"], "a1")
    await answered(run, "left", ["user", "a1", "more"], "a2")
    await answered(run, "right", ["user", "a1", "else"], "a3")
    whole = ["user", "a1", "more", "a2", "go"]
    assert await answered(run, "x", whole, "a4") == "left"
    assert await answered(run, "y", whole, "a4", parent="right") == "t1"
    assert await answered(run, "z", whole, "a4", parent="left") == "left"
    await refused(Reason.NOT_FOUND, run.begin("r", "w", whole, parent="nobody"))
