"""The prefix tree: matches, leaves, and that each policy token is trained exactly once."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.lib.token_bytes import pack_ids
from tests.lib.trajectory_manager.support import policy, tokens
from trajectory_manager.model.prefix_tree import PrefixTree, common_tokens
from trajectory_manager.model.tokens import Span, Tokens, Turn


def turn(turn_id: str, own: int = 0, parent: str = "", prefix_length: int = 0) -> Turn:
    """A turn that shares `prefix_length` tokens with `parent` and adds `own`."""
    return Turn(
        turn_id=turn_id,
        attempt_id="a",
        prompt_digest="",
        prefix_turn_id=parent,
        prefix_length=prefix_length,
        tokens=tokens([0] * own) if own else Tokens(),
    )


def test_a_chain_is_one_sample() -> None:
    """Turns that continue each other to the end give one leaf."""
    tree = PrefixTree([turn("a", 4), turn("b", 3, "a", 4), turn("c", 2, "b", 7)])
    assert list(tree.leaves()) == ["c"]
    assert [(piece.turn_id, piece.stop) for piece in tree.pieces("c")] == [
        ("a", 4),
        ("b", 3),
        ("c", 2),
    ]


def test_a_fork_in_the_middle_leaves_two_samples() -> None:
    """A turn that leaves its parent before its end makes both of them leaves."""
    tree = PrefixTree([turn("a", 4), turn("b", 3, "a", 2)])
    assert list(tree.leaves()) == ["a", "b"]
    assert [(piece.turn_id, piece.stop) for piece in tree.pieces("b")] == [("a", 2), ("b", 3)]


def test_a_turn_without_tokens_is_no_leaf() -> None:
    """An opened turn that recorded nothing changes nothing, also as a parent."""
    tree = PrefixTree([turn("a", 4), turn("b", 0, "a", 4), turn("c", 2, "b", 4)])
    assert list(tree.leaves()) == ["c"]
    assert list(PrefixTree([turn("a", 4), turn("b", 0, "a", 4)]).leaves()) == ["a"]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_tokens_counts_the_common_prefix(first: list[int], second: list[int]) -> None:
    """The binary search equals the obvious loop."""
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert common_tokens(pack_ids(first), pack_ids(second)) == expected


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_every_policy_token_is_trained_once(seed: int) -> None:
    """Over random trees: samples train each trainable token exactly once, over what is stored."""
    dice = random.Random(seed)
    turns: list[Turn] = []
    added: dict[str, Tokens] = {}
    whole: dict[str, list[int]] = {"": []}
    next_token = iter(range(10**6))
    for index in range(dice.randint(1, 6)):
        parent = dice.choice([*added, ""])
        prefix = dice.choice([len(whole[parent]), dice.randint(0, len(whole[parent]))])
        name = f"t{index}"
        ids = [next(next_token) for _ in range(dice.randint(0, 4))]
        cut = dice.randint(0, len(ids))
        added[name] = (
            tokens(ids[:cut]).joined(tokens(ids[cut:], policy(index))) if ids else Tokens()
        )
        spans = tuple(span for span in added[name].spans if span.num_tokens)
        added[name] = added[name]._replace(spans=spans)
        whole[name] = whole[parent][:prefix] + ids
        turns.append(turn(name, len(ids), parent if prefix else "", prefix))
    tree = PrefixTree(turns)
    spans_of = {name: own.spans for name, own in added.items()}
    trained = Counter[tuple[str, int]]()
    for plan in tree.sample_plans(spans_of):
        path = [(piece.turn_id, piece.stop) for piece in plan.pieces]
        assert sum(stop for _, stop in path) == len(whole[plan.leaf_turn_id])
        for (name, stop), start in zip(path, plan.trained_from, strict=True):
            for position in range(start, stop):
                if _span_at(spans_of[name], position).trainable:
                    trained[name, position] += 1
    expected = {
        (name, position): 1
        for name, own in added.items()
        for position in range(own.num_tokens)
        if _span_at(own.spans, position).trainable
    }
    assert trained == expected


def _span_at(spans: tuple[Span, ...], position: int) -> Span:
    end = 0
    for span in spans:
        end += span.num_tokens
        if position < end:
            return span
    raise IndexError(position)
