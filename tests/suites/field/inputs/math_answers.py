"""Mathematical answers: equal values score 1 in every form, others 0; sympy alone says which."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import sympy
from hypothesis import strategies
from seamflow.client.turn import Task

from services.tool_loop import score_client
from services.tool_loop.config import ToolLoopConfig
from services.tool_loop.tool_loop import Rewards
from tests.suites.field import event_loop
from tests.suites.field.kind import Kind

PATTERN = "Answer: (.*)"
X, Y = sympy.symbols("x y")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a policy said, and its reward."""

    gold: str
    text: str
    reward: float
    pattern: str = ""


@cache
def _rewards(pattern: str) -> Rewards:
    config = ToolLoopConfig(rewards={"math": "math"}, answer_pattern=pattern)
    rewards = Rewards(config)
    atexit.register(lambda: event_loop.run(rewards.close()))
    return rewards


async def check(answer: Answer) -> None:
    """The reward of the tool loop is the right one."""
    task = Task(task_id="t", payload={"answer": answer.gold})
    transcript: list[dict[str, Any]] = [{"role": "assistant", "content": answer.text}]
    found = (await _rewards(answer.pattern).of(task, transcript))["math"]
    if found != answer.reward:
        raise AssertionError(f"reward {found}")


async def check_bounded(given: tuple[str, str, str]) -> None:
    """One without an end scores 0 at its limit."""
    how, pattern, text = given
    config = ToolLoopConfig(rewards={"long": how}, answer_pattern=pattern)
    with patch.object(score_client, "LEVELS", ((0.05, 1), (0.2, 1))):
        rewards = Rewards(config)
    task = Task(task_id="t", payload={"answer": "5"})
    try:
        found = await rewards.of(task, [{"role": "assistant", "content": text}])
    finally:
        await rewards.close()
    if found != {"long": 0.0}:
        raise AssertionError(f"reward {found}")


FORMS = (
    ("{}", ""),
    ("${}$", ""),
    (r"So it is \boxed{{{}}}.", ""),
    (r"First \boxed{{17}}, and then $\boxed{{{}}}$", ""),
    ("I think.\nAnswer: {}", PATTERN),
    ("Answer: 17. No.\nAnswer: ${}$", PATTERN),
    (r"Answer: \({}\)", PATTERN),
    (r"Answer: \boxed{{{}}}", PATTERN),
)
INTEGERS = strategies.integers(-99, 99).map(sympy.Integer)
POSITIVE = strategies.integers(1, 40).map(sympy.Integer)
RATIONALS = strategies.builds(sympy.Rational, INTEGERS, POSITIVE)
ROOTS = strategies.builds(sympy.root, POSITIVE, strategies.integers(2, 4))
POWERS = strategies.builds(sympy.Pow, strategies.integers(2, 9), strategies.integers(-120, 120))
NUMBERS = strategies.one_of(
    RATIONALS,
    POWERS,
    strategies.builds(lambda a, b: a * sympy.sqrt(b), RATIONALS, POSITIVE),
    strategies.builds(lambda a, b: a + b, RATIONALS, ROOTS),
    RATIONALS.map(lambda value: value * sympy.pi),
)
POLYNOMIALS = strategies.lists(INTEGERS, min_size=2, max_size=4).map(
    lambda terms: sum((c * X**power for power, c in enumerate(terms)), sympy.Integer(0)) + X * Y
)
INTERVALS = strategies.builds(
    lambda start, size, left, right: sympy.Interval(start, start + size, left, right),
    RATIONALS,
    POSITIVE,
    strategies.booleans(),
    strategies.booleans(),
)
SETS = strategies.lists(NUMBERS, min_size=2, max_size=3).map(lambda all_: sympy.FiniteSet(*all_))
TUPLES = strategies.lists(NUMBERS, min_size=3, max_size=4).map(lambda all_: sympy.Tuple(*all_))
MATRICES = strategies.lists(RATIONALS, min_size=4, max_size=4).map(
    lambda all_: sympy.Matrix(2, 2, all_)
)
VALUES = strategies.one_of(NUMBERS, POLYNOMIALS, INTERVALS, SETS, TUPLES, MATRICES)


def _changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, sympy.Interval):
        return sympy.Interval(value.start, value.end, not value.left_open, value.right_open)
    if isinstance(value, sympy.MatrixBase):
        return value + sympy.ones(*value.shape)
    if isinstance(value, sympy.FiniteSet | sympy.Tuple):
        first, *others = value.args
        return type(value)(_changed(first), *others)
    return value * 2 if value != 0 else sympy.Integer(1)


def _latex(value: Any, variant: int) -> str:
    """LaTeX of a value; its variants are those of people."""
    if isinstance(value, sympy.Tuple):
        return "(" + ", ".join(sympy.latex(each) for each in value) + ")"
    text = str(sympy.latex(value, mul_symbol="dot" if variant == 3 else None))
    if variant == 1:
        return text.replace(r"\frac", r"\dfrac")
    return text.replace(r"\left", "").replace(r"\right", "") if variant == 2 else text


def _rewritten(value: Any) -> Any:
    """The same value in another form."""
    if isinstance(value, sympy.Expr):
        form = sympy.factor(value) if value.free_symbols else sympy.nsimplify(value)
        return form if sympy.simplify(form - value) == 0 else value
    return value


@strategies.composite
def answers(draw: Any) -> Answer:
    """A value in one form as gold, and the same or another one in another form as answer."""
    gold = draw(VALUES)
    is_right = draw(strategies.booleans())
    said = _rewritten(gold) if is_right else _changed(gold)
    if not is_right and gold == said:  # a set that has the changed element already
        is_right = True
    text, pattern = draw(strategies.sampled_from(FORMS))
    variants = strategies.integers(0, 3)
    content = text.format(_latex(said, draw(variants)))
    return Answer(_latex(gold, draw(variants)), content, float(is_right), pattern)


@strategies.composite
def units(draw: Any) -> Answer:
    """Percents, degrees and money; the right one, or one more."""
    number, more = draw(strategies.integers(2, 400)), draw(strategies.integers(0, 1))
    said = number + more
    share = sympy.latex(sympy.Rational(said, 100))
    gold, forms = draw(
        strategies.sampled_from(
            [
                (rf"{number}\%", [rf"{said}\%", f"{said}%", share, f"{said / 100}"]),
                (rf"{number}^\circ", [rf"{said}^\circ", f"{said}°", f"{said}", f"{said} degrees"]),
                (f"{number}", [f"${said}", rf"\${said}", f"{said}.0", f"{said} dollars"]),
                (rf"{number} \text{{ cm}}", [f"{said}", f"{said} cm", rf"{said}\,\text{{cm}}"]),
            ]
        )
    )
    text, pattern = draw(strategies.sampled_from((("{}", ""), ("Answer: {}", PATTERN))))
    return Answer(gold, text.format(draw(strategies.sampled_from(forms))), 1.0 - more, pattern)


EXAMPLES = [
    Answer(r"\sqrt{2}", r"Answer: \sqrt{2}", 1.0, PATTERN),
    Answer("2", r"Answer: 2\pi", 0.0, PATTERN),
    Answer("2", r"The answer is 2\pi", 0.0),
    Answer(r"2\pi", r"The answer is 2\pi.", 1.0),
    Answer("2", r"Answer: 2\sqrt{3}", 0.0, PATTERN),
    Answer("2", "Answer: 2x", 0.0, PATTERN),
    Answer("x^2+2x+1", "Answer: (x+1)^2", 1.0, PATTERN),
    Answer(r"\{1, 2\}", r"Answer: \{2, 1\}", 1.0, PATTERN),
    Answer("[1, 2)", "Answer: [1, 2]", 0.0, PATTERN),
    Answer("2", "Answer: $2 @ 3$", 0.0, PATTERN),
    Answer("4", r"\boxed{4}. Let me redo it. The final answer is \boxed{", 0.0),
    Answer("4", r"\boxed{4}. Let me redo it. The final answer is \boxed{\frac{1}{2}", 0.0),
    Answer("4", r"Answer: 4. Or better \boxed{", 0.0, "Answer: ([0-9]+)"),
    Answer("4", r"\boxed{5}. Let me redo it. The final answer is \boxed{4}", 1.0),
    Answer(r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", 0.0),
    Answer(r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}", 1.0),
    Answer(r"10^{100}", r"\boxed{10^{100}+1}", 0.0),
    Answer(r"\{1, \frac{1}{2^{99}}\}", r"\boxed{\{1, \frac{1}{2^{98}}\}}", 0.0),
    Answer(r"x+\frac{1}{2^{99}}", r"\boxed{x+\frac{1}{2^{98}}}", 0.0),
    Answer(r"\sqrt{2}+\sqrt{3}", r"\boxed{\sqrt{5+2\sqrt{6}}}", 1.0),
    Answer(r"1.5 \times 10^{-20}", r"\boxed{1.6 \times 10^{-20}}", 0.0),
    Answer(r"1.5 \times 10^{-20}", "1.5e-20", 1.0),
    Answer(r"\frac{1}{3}", r"\boxed{0.333333}", 1.0),
    Answer(r"50\%", r"\boxed{0.5}", 1.0),
    Answer("90", r"\boxed{90^\circ}", 1.0),
    Answer("18", "She makes $18 dollars.", 1.0),
    Answer("18", "Answer: 18 dollars", 1.0, PATTERN),
    Answer("100", "The area is 100 m^2.", 1.0),
    Answer("[1, 2)", r"\boxed{1 \le x < 2}", 1.0),
    Answer("[1, 2)", r"\boxed{1 < x < 2}", 0.0),
    Answer("18 dollars", r"\boxed{18}", 1.0),
    Answer("June 20", r"\boxed{June 20}", 1.0),
    Answer("June 20", "Answer: June 20", 1.0, PATTERN),
    Answer("June 20", r"\boxed{July 20}", 0.0),
    Answer("even", r"\boxed{\text{even}}", 1.0),
    Answer("even", r"\boxed{\text{odd}}", 0.0),
    *(
        Answer("61", text, 1.0)
        for text in ("The answer is **61**.", "*61*", "`61`", "__61__", "#### 61", "***61***")
    ),
    Answer("5", "The answer is **61** of 5.", 0.0),
    *(
        Answer("42", text, 1.0)
        for text in ("答案是 42。", "答案是42。", "Ответ: 42", "✅ 42", "é: 42")
    ),
    *(
        Answer("42", f"Answer: {text}", 1.0, PATTERN)
        for text in ("€42", "42 €", "42元", "42 µm", "42 m/s", "４２", "٤٢")
    ),
    Answer("-5", "Das ist −5.", 1.0),
    Answer("5", "Answer: −5", 0.0, PATTERN),
    Answer("2", r"\boxed{2xy}", 0.0),
    Answer("2", r"\boxed{2\sqrt{ab}}", 0.0),
    Answer("2xy", r"\boxed{2}", 0.0),
    Answer("2", "The answer is 2x", 0.0),
    Answer("2", "Answer: 2xy", 0.0, PATTERN),
    Answer(r"\emptyset", r"\boxed{\varnothing}", 1.0),
    Answer("12345", r"\boxed{12\,345}", 1.0),
    Answer("12345", r"It is $12\,345$.", 1.0),
    Answer(r"\frac{1}{3}", r"\boxed{0.\overline{3}}", 1.0),
    Answer(r"\frac{1}{6}", r"\boxed{0.1\overline{6}}", 1.0),
    Answer(r"\frac{1}{3}", r"\boxed{0.\overline{34}}", 0.0),
    Answer("13/4", "The answer is 3 1/4.", 1.0),
    Answer("13/4", r"\boxed{3 1/4}", 1.0),
    Answer("3", "The answer is 3 1/4.", 0.0),
    Answer("61", r"$9^{9^{9^{9}}}$, " * 13 + r"\boxed{61}", 1.0),
    Answer(r"\{1, 2\}", r"\boxed{1} and \boxed{2}", 1.0),
]

KINDS = (
    Kind(
        name="math answers",
        check=check,
        examples=EXAMPLES,
        generated=strategies.one_of(answers(), units()),
        short=40,
    ),
    Kind(
        name="long comparisons",
        check=check_bounded,
        examples=[
            (r"regex:^(\w+\s?)+$", "", "a" * 60 + "!"),
            (r"regex:(a|aa)+$", "", "a" * 60 + "!"),
            (r"regex:^(\d+)*x", "", "1" * 60),
            ("exact", r"((\w+\s?)+)$", "a" * 60 + "!"),
            ("math", "", r"\boxed{9^{9^{9^{9}}}}"),
        ],
    ),
)
