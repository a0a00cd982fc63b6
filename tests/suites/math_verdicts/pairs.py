"""Pairs of an expected answer and what a policy said, with right values known by construction."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.suites.field.inputs import math_answers

ROOT = Path(__file__).parents[3]
PATTERN = math_answers.PATTERN
_GYM_PYTHON = ROOT / ".venv-adapters" / "reasoning_gym" / "bin" / "python"
_GYM_SETS = (
    "basic_arithmetic", "chain_sum", "fraction_simplification", "gcd", "lcm", "prime_factorization",
    "simple_equations", "decimal_arithmetic", "complex_arithmetic", "polynomial_multiplication",
    "simple_integration", "number_sorting", "time_intervals", "calendar_arithmetic", "count_primes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """What is expected, what was said, and whether it is right."""

    gold: str
    text: str
    is_right: bool
    pattern: str = ""


MARKDOWN = (
    "The answer is **{}**.",
    "**{}**",
    "*{}*",
    "`{}`",
    "__{}__",
    "_{}_",
    "***{}***",
    "#### {}",
    "## Answer\n\n{}",
    "> {}",
    "- {}",
    "The answer is `{}`.",
    "The final answer is **{}**",
    "**Answer:** {}",
    "**Answer: {}**",
    "So we get *{}*.",
    "| total | {} |\n",
    "The answer is __{}__.",
    "1. add\n2. carry\n\n**{}**",
    "### Final answer: {}",
    "The answer is **{}** of 5.",
    "```\n{}\n```",
    "The result is **{}** apples.",
    "**x = {}**",
    "**${}$**",
    "**\\boxed{{{}}}**",
    "---\n**Result**: {}",
)
SCRIPTS = (
    "The answer is {}.",
    "答案是 {}。",
    "答案是{}。",
    "答えは{}です。",
    "Ответ: {}",
    "Ответ равен {}.",
    "الجواب هو {}.",
    "उत्तर {} है।",
    "Η απάντηση είναι {}.",
    "התשובה היא {}.",
    "답은 {}입니다.",
    "정답: {}",
    "คำตอบคือ {}",
    "Die Lösung ist {}.",
    "La réponse est « {} ».",
    "✅ {}",
    "é: {}",
    "最终答案：{}",
    "**答案：{}**",
    "პასუხია {}.",
    "¡La respuesta es {}!",
    r"Ответ: $\boxed{{{}}}$",
    r"答案是 \boxed{{{}}}。",
)
DIGITS = ("٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３４５６７８９", "๐๑๒๓๔๕๖๗๘๙")
UNITS = (
    "{} µm",
    "€{}",
    "{} €",
    "{}元",
    "¥{}",
    "{}円",
    "{} 个",
    "{}°",
    "₹{}",
    "{} км",
    "{} W",
    "{} m",
    "{} m/s",
    "{} dollars",
    "${}",
    r"{}\,\text{{cm}}",
    "{} cm",
    "about {} hours",
    "{} km.",
)
CHOICES = (
    (r"\boxed{{{}}}", ""),
    (r"\boxed{{\text{{{}}}}}", ""),
    (r"$\text{{{}}}$", ""),
    ("Answer: {}", PATTERN),
    (r"so \boxed{{\mathrm{{{}}}}}", ""),
    ("Answer: **{}**", PATTERN),
    ("The answer is {}.", ""),
    ("Answer: {}.", PATTERN),
    ("The correct option is **{}**.", ""),
    ("({})", ""),
)
WORDS = ("even", "odd", "Monday", "Paris", "yes", "no", "June 20", "3 hours 20 minutes", *"ABCDE")
TEXTS = (r"so \boxed{{{}}}", "The answer is ${}$.", r"Hence \({}\)", r"\[{}\]", "Answer: {}")


def collections(per_collection: int, with_seed: int, *, packages: bool) -> dict[str, list[Pair]]:
    """The collections by name.

    Args:
        per_collection: pairs of each generated collection.
        with_seed: of all of them.
        packages: also those of packages: math-verify's own tests, answers of reasoning-gym.
    """
    draw = random.Random(with_seed)
    made: dict[str, Callable[[], list[Pair]]] = {
        "latex": lambda: _drawn(math_answers.answers(), per_collection, with_seed),
        "units in latex": lambda: _drawn(math_answers.units(), per_collection // 2, with_seed),
        "markdown": lambda: _numbers(draw, [(form, "") for form in MARKDOWN], per_collection),
        "scripts": lambda: _numbers(draw, [(form, "") for form in SCRIPTS], per_collection, DIGITS),
        "units": lambda: _numbers(draw, [(f"Answer: {u}", PATTERN) for u in UNITS], per_collection),
        "choices": lambda: _choices(draw, per_collection),
    }
    if packages:
        made |= {"math-verify's tests": _library_tests, "reasoning-gym": lambda: _gym(draw)}
    return {name: make() for name, make in made.items()}


def _drawn(strategy: SearchStrategy[math_answers.Answer], count: int, with_seed: int) -> list[Pair]:
    found: list[Pair] = []

    @seed(with_seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(strategy)
    def collect(answer: math_answers.Answer) -> None:
        found.append(Pair(answer.gold, answer.text, bool(answer.reward), answer.pattern))

    collect()
    return found


def _numbers(
    draw: random.Random,
    forms: Sequence[tuple[str, str]],
    count: int,
    digits: Sequence[str] = (),
) -> list[Pair]:
    pairs = []
    for index in range(count):
        form, pattern = forms[index % len(forms)]
        gold = draw.choice(
            [draw.randint(6, 999), draw.randint(1000, 99_999), draw.randint(-99, -6)]
        )
        said = gold + draw.choice([0, 0, 0, 1, -1, 100])
        text = str(said)
        if digits and draw.random() < 0.2:
            text = text.translate(str.maketrans("0123456789", draw.choice(digits)))
        pairs.append(Pair(str(gold), form.format(text), said == gold, pattern))
    return pairs


def _choices(draw: random.Random, count: int) -> list[Pair]:
    pairs = []
    for index in range(count):
        form, pattern = CHOICES[index % len(CHOICES)]
        gold = draw.choice(WORDS)
        said = gold if draw.random() < 0.5 else draw.choice(WORDS)
        pairs.append(Pair(gold, form.format(said), said == gold, pattern))
    return pairs


def _library_tests() -> list[Pair]:
    """Those that the source distribution of math-verify carries, with its own right values."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        subprocess.run([*command, ":all:", "math-verify", "-d", folder], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        files = sorted(Path(folder).glob("*/tests/test_*.py"))
        return [pair for file in files for pair in _parametrized(ast.parse(file.read_text()))]


def _parametrized(tree: ast.Module) -> Iterator[Pair]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2]
    for call in calls:
        names, rows = call.args
        is_of_pairs = isinstance(names, ast.Constant) and names.value in (
            "gold,pred,expected", "gold, pred, expected", "gold,pred,result", "gold, pred, result",
        )  # fmt: skip
        for row in rows.elts if is_of_pairs and isinstance(rows, ast.List) else ():
            try:
                gold, said, is_right = ast.literal_eval(row)
            except ValueError:  # not a literal
                continue
            yield Pair(gold, said, bool(is_right))


def _gym(draw: random.Random) -> list[Pair]:
    """Answers of data sets of reasoning-gym, each in a form and beside the answer of another."""
    program = (
        "import json, sys, reasoning_gym\n"
        "print(json.dumps([[e['answer'] for e in reasoning_gym.create_dataset(n, size=12, seed=0)]"
        " for n in sys.argv[1:]]))"
    )
    command = [str(_GYM_PYTHON), "-c", program, *_GYM_SETS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    pairs = []
    for answers in json.loads(ended.stdout):
        for gold, other in zip(answers, answers[1:] + answers[:1], strict=True):
            for said in {gold, other}:
                form = draw.choice(TEXTS)
                pattern = PATTERN if form.startswith("Answer") else ""
                pairs.append(Pair(gold, form.format(said), said == gold, pattern))
    return pairs
