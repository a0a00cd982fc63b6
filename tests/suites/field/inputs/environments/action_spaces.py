"""Actions of Gymnasium's spaces: what the adapter prints of one is that one when it is read."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from hypothesis import strategies

from adapters.gymnasium.spaces import ActionText, json_of
from adapters.replies import UnreadableAction
from tests.suites.field.kind import Kind

Space = spaces.Space[Any]
ENDS = re.compile(r", such as (?P<example>.*)", re.DOTALL)


def check_actions(space: Space) -> None:
    """The printed example, and sampled actions, in an answer and as a tool's argument."""
    actions = ActionText(space)
    if (found := ENDS.search(actions.description())) is not None:
        _check_contained(space, actions.of_text(found["example"]))
    space.seed(1)
    for _ in range(3):
        action = space.sample()
        printed = json.dumps(json_of(space, action))
        answers = [printed] if isinstance(space, spaces.Text) else [printed, f"I take {printed}."]
        read = [actions.of_text(text) for text in answers]
        for each in (*read, actions.of_value(json.loads(printed))):
            _check_contained(space, each)
            if not data_equivalence(_plain(each), _plain(action), exact=True):
                raise AssertionError(f"{action!r} was printed as {printed} and read as {each!r}")


def check_names(names: tuple[str, ...]) -> None:
    """Each name in a sentence is its own action, also one that begins as another does."""
    actions = ActionText(spaces.Discrete(len(names)), names)
    for index, name in enumerate(names):
        for text in (name, f"I will {name}.", f"not {names[0]}, but {name.upper()}"):
            if actions.of_text(text) != index:
                raise AssertionError(f"{text!r} of {names} was read as {actions.of_text(text)!r}")


def _check_contained(space: Space, action: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not space.contains(action):
            raise AssertionError(f"{action!r} is not in the space")


def _plain(action: Any) -> Any:
    """Numbers of Python and numpy alike."""
    if isinstance(action, str | int | float):
        return action
    if isinstance(action, dict):
        return {name: _plain(each) for name, each in action.items()}
    if isinstance(action, tuple):
        return tuple(_plain(each) for each in action)
    return action.item() if isinstance(action, np.generic) or np.shape(action) == () else action


@dataclass(frozen=True, slots=True)
class Answer:
    """What a policy said in a space, and the action; None: it is none."""

    space: Space
    text: str
    action: Any


def check_answer(answer: Answer) -> None:
    """It is read as the action, or refused."""
    try:
        found = ActionText(answer.space).of_text(answer.text)
    except UnreadableAction:
        if answer.action is None:
            return
        raise
    if not data_equivalence(_plain(found), _plain(answer.action)):
        raise AssertionError(f"read {found!r}")


UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,), np.float32)
MOVE = spaces.Dict({"go": spaces.Discrete(4), "speed": spaces.Box(0, 1, (1,), np.float32)})
FAST = {"go": 3, "speed": np.array([0.5], np.float32)}
TWO = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3, start=-1)))
WORD = spaces.Text(5, min_length=2, charset="abc")
SPACES: list[Space] = [
    spaces.Discrete(3),
    spaces.Discrete(3, start=-2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    spaces.MultiDiscrete([2, 3], start=[-1, 4]),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 2]),
    spaces.Box(0, 1, (2,), np.float32),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Box(1e-5, 2e-5, (1,), np.float32),
    spaces.Box(np.array([-np.inf, 0], np.float32), np.array([0, np.inf], np.float32)),
    UNBOUNDED,
    spaces.Box(0, 1, (0,), np.float32),
    WORD,
    spaces.Text(4, min_length=0),
    spaces.Text(4, charset='"\\ {}[]1'),
    MOVE,
    TWO,
    spaces.Dict({"a": MOVE, "b": spaces.Dict({"c": WORD})}),
    spaces.Tuple((WORD, MOVE, spaces.Tuple((UNBOUNDED,)))),
    spaces.Sequence(spaces.Discrete(3)),
    spaces.Sequence(MOVE),
    spaces.Sequence(spaces.Box(0, 1, (2,), np.float32), stack=True),
    spaces.OneOf((spaces.Discrete(2), WORD, MOVE)),
    spaces.Dict({"pick": spaces.OneOf((spaces.Discrete(2), UNBOUNDED))}),
]
ANSWERS = [
    Answer(MOVE, 'First {"go": 0, "speed": [0]}, no: {"go": 3, "speed": [0.5]}', FAST),
    Answer(MOVE, 'I choose {"go": 3, "speed": [0.5]}, with 2 legs', FAST),
    Answer(MOVE, '{"go": 3}', None),
    Answer(MOVE, '{"go": 3, "speed": [0.5], "more": 1}', None),
    Answer(MOVE, '{"go": 4, "speed": [0.5]}', None),
    Answer(MOVE, '{"go": true, "speed": [0.5]}', None),
    Answer(MOVE, "go 3", None),
    Answer(TWO, "[1, -1]", (1, -1)),
    Answer(TWO, "[1]", None),
    Answer(TWO, "[1, 2, 3]", None),
    Answer(WORD, "abc", "abc"),
    Answer(WORD, '"abc"', "abc"),
    Answer(WORD, "  abc\n", "abc"),
    Answer(WORD, 'My word is "cab".', "cab"),
    Answer(WORD, "dog", None),
    Answer(WORD, "a", None),
    Answer(spaces.MultiDiscrete([2, 3]), "[0.5, 1]", None),
    Answer(spaces.MultiDiscrete([2, 3]), "[1, 3]", None),
    Answer(spaces.MultiBinary(2), "[1, 2]", None),
    Answer(spaces.Box(0, 255, (1,), np.uint8), "[300]", None),
    Answer(spaces.Box(0, 255, (1,), np.uint8), "[-1]", None),
    Answer(spaces.Box(0, 255, (1,), np.uint8), "[1.5]", None),
    Answer(UNBOUNDED, "[1, NaN]", None),
    Answer(UNBOUNDED, '["1", "2"]', None),
    Answer(UNBOUNDED, "[[1], [2, 3]]", None),
    Answer(UNBOUNDED, "[1, 2.5]", np.array([1, 2.5], np.float32)),
    Answer(spaces.Sequence(spaces.Discrete(3)), "[]", ()),
    Answer(spaces.Sequence(spaces.Discrete(3)), "[0, 3]", None),
    Answer(spaces.OneOf((spaces.Discrete(2), WORD)), '[1, "abc"]', (1, "abc")),
    Answer(spaces.OneOf((spaces.Discrete(2), WORD)), '[0, "abc"]', None),
    Answer(spaces.OneOf((spaces.Discrete(2), WORD)), "[2, 1]", None),
]

BOUNDS = strategies.sampled_from((-np.inf, -1000.0, -1.5, -1e-6, 0.0))
FLOATS = strategies.sampled_from((np.float16, np.float32, np.float64))
SHAPES = strategies.lists(strategies.integers(1, 3), max_size=3).map(tuple)
LEAVES: strategies.SearchStrategy[Space] = strategies.one_of(
    strategies.builds(spaces.Discrete, strategies.integers(1, 9), start=strategies.integers(-9, 9)),
    strategies.lists(strategies.integers(1, 5), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    strategies.lists(strategies.integers(1, 3), min_size=1, max_size=2).map(spaces.MultiBinary),
    strategies.builds(
        lambda low, high, shape, kind: spaces.Box(low, 0.0 - high, shape, kind),
        BOUNDS,
        BOUNDS,
        SHAPES,
        FLOATS,
    ),
    SHAPES.map(lambda shape: spaces.Box(-5, 5, shape, np.int8)),
    strategies.builds(
        lambda low, more, charset: spaces.Text(low + more, min_length=low, charset=charset),
        strategies.integers(0, 3),
        strategies.integers(0, 3),
        # Of a text with NUL at its end numpy drops it: Gymnasium's own samples are outside then.
        strategies.sets(strategies.characters(exclude_characters="\0"), min_size=1, max_size=5).map(
            frozenset
        ),
    ),
)
NAMES = strategies.text(min_size=1, max_size=4)
WORDS = strategies.sampled_from(("move", "left", "right", "up", "a", "move-up", "+1", "é"))
ACTION_NAMES = strategies.lists(
    strategies.lists(WORDS, min_size=1, max_size=3).map(" ".join),
    min_size=1,
    max_size=6,
    unique=True,
).map(tuple)
ALL_SPACES = strategies.recursive(
    LEAVES,
    lambda inner: strategies.one_of(
        strategies.dictionaries(NAMES, inner, min_size=1, max_size=3).map(spaces.Dict),
        strategies.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        strategies.lists(inner, min_size=1, max_size=3).map(spaces.OneOf),
        inner.map(spaces.Sequence),
    ),
    max_leaves=4,
)

KINDS = (
    Kind(
        name="action spaces", check=check_actions, examples=SPACES, generated=ALL_SPACES, short=60
    ),
    Kind(name="actions", check=check_answer, examples=ANSWERS),
    Kind(
        name="action names",
        check=check_names,
        examples=[("move", "move left"), ("left", "turn left", "left turn"), ("a", "a b", "a b c")],
        generated=ACTION_NAMES,
        short=40,
    ),
)
