"""What is learned from prompts and lengths, and how it is judged."""

from __future__ import annotations

import numpy as np
import pytest

from bench.rollout.prompts import PromptWorld, load_workload
from services.ranker.features import TurnStart
from services.ranker.learner import Memory, learn, recall_of_longest
from tests.lib.ranker.support import length, prompts


def start(number: int, ids: list[int]) -> TurnStart:
    """The first turn of a task."""
    return TurnStart(task_id=f"task-{number}@0", token_ids=ids, turn_index=0)


def remembered(number: int, lengths: list[int], max_prompts: int = 4096) -> Memory:
    """A memory of these prompts and lengths."""
    memory = Memory(max_prompts)
    for i, (ids, tokens) in enumerate(zip(prompts(number), lengths, strict=True)):
        memory.add(start(i, ids), tokens)
    return memory


def test_recall_is_the_share_of_the_longest_fifth() -> None:
    """Two of ten turns are the longest; finding one of them is a recall of one half."""
    actual = np.arange(10.0)
    assert recall_of_longest(actual, actual) == 1.0
    assert recall_of_longest(-actual, actual) == 0.0
    assert recall_of_longest(np.array([0, 0, 0, 0, 0, 0, 0, 5, 1, 9.0]), actual) == 0.5


def test_turns_that_end_at_a_limit_are_equally_right() -> None:
    """Four of ten end there, any two of them are the longest fifth; a short one is not."""
    actual = np.array([1.0, 2, 3, 4, 5, 6, 9, 9, 9, 9])
    for found in ((6, 7), (9, 6)):
        predicted = np.zeros(10)
        predicted[list(found)] = 1.0
        assert recall_of_longest(predicted, actual) == 1.0
    assert recall_of_longest(-actual, actual) == 0.0
    one_longer = np.array([1.0, 2, 3, 4, 5, 6, 9, 9, 9, 10])  # and only one of the others
    assert recall_of_longest(np.array([0.0, 0, 0, 0, 0, 0, 1, 1, 0, 0]), one_longer) == 0.5


def test_lengths_that_depend_on_words_are_learned() -> None:
    """And the ranker's own recall on held-out tasks agrees."""
    lengths = [length(ids) for ids in prompts(400)]
    learned = learn(remembered(400, lengths).examples())
    new = prompts(200, seed=1)
    expected = learned.expected_tokens([start(1000 + i, ids) for i, ids in enumerate(new)])
    actual = np.array([float(length(ids)) for ids in new])
    assert recall_of_longest(np.array(expected), actual) >= 0.8
    assert learned.recall >= 0.8
    assert (learned.num_turns, learned.median_tokens) == (400, float(np.median(lengths)))


def test_nothing_is_found_where_lengths_depend_on_nothing() -> None:
    """Negative control: the same lengths, dealt to other prompts, are ranked as by chance."""
    lengths = [length(ids) for ids in prompts(400)]
    np.random.default_rng(0).shuffle(lengths)
    assert learn(remembered(400, lengths).examples()).recall < 0.5


def test_words_that_act_together_are_learned() -> None:
    """A marker that matters in one topic and not in the other: no sum of words predicts it."""
    workload = load_workload()
    workload["prompts"] |= {"topics": 4, "markers": 4, "words_per_topic": 20}
    world = PromptWorld(workload, seed=3)
    seen, new = world.prompts(500), world.prompts(300)
    memory = Memory(1000)
    for i, (ids, (tokens,)) in enumerate(zip(seen.token_ids, world.answers(seen, 1), strict=True)):
        memory.add(start(i, ids), int(tokens))
    learned = learn(memory.examples())
    actual = world.answers(new, 1).ravel()
    found = learned.expected_tokens([start(9000 + i, x) for i, x in enumerate(new.token_ids)])
    oracle = recall_of_longest(new.mean_log_lengths, actual)
    assert recall_of_longest(np.array(found), actual) >= 0.9 * oracle


def test_a_task_that_comes_again_is_remembered() -> None:
    """Its prompt is uninformative; only its earlier answers predict it."""
    memory = Memory(100)
    for i in range(50):
        for tokens in (10, 12) if i % 5 else (1000, 1200):
            memory.add(TurnStart(task_id=f"{i}@0", token_ids=[1, 2], turn_index=0), tokens)
    again = [TurnStart(task_id=f"{i}@1", token_ids=[1, 2], turn_index=0) for i in (0, 1)]
    long, short = learn(memory.examples()).expected_tokens(again)
    assert long > 2 * short


def test_answers_to_one_prompt_are_one_example_with_the_newest_lengths() -> None:
    """Bounded in prompts and in answers of each."""
    memory = Memory(3)
    for i in range(5):
        for tokens in range(40):
            memory.add(start(i, [i]), tokens)
    examples = memory.examples()
    assert [example.lengths for example in examples] == [tuple(range(8, 40))] * 3


def test_one_turn_is_enough_to_begin_with() -> None:
    """There is nothing to validate on, so the recall is 0."""
    learned = learn(remembered(1, [100]).examples())
    assert learned.expected_tokens([start(1, [5])]) == pytest.approx([100])
    assert learned.recall == 0.0
    assert learned.expected_tokens([]) == []


def test_learning_twice_gives_the_same() -> None:
    """No seed, no drift."""
    examples = remembered(100, [length(ids) for ids in prompts(100)]).examples()
    probe = [start(i, ids) for i, ids in enumerate(prompts(5, seed=2))]
    assert learn(examples).expected_tokens(probe) == learn(examples).expected_tokens(probe)
