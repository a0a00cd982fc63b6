"""When two numbers or expressions are equal: exactly, unless one is a decimal.

math-verify compares sets, intervals, matrices and relations; its rule for numbers lets exact values
be equal whose difference is below 1e-15, such as 2^-99 and 2^-98.
"""

from __future__ import annotations

from typing import Any

import sympy
from math_verify import grader, verify  # type: ignore[import-untyped]

__all__ = ["are_equal"]

_SECONDS = 5
_DIGITS = 60
_EXACT = sympy.Float(10, _DIGITS) ** (10 - _DIGITS)
_HALF_DECIMAL = sympy.Float("5e-7")
"""Half of the sixth decimal, so that 0.333333 is 1/3."""
_SHARE = sympy.Float("1e-4")
"""Largest relative difference, so that a small decimal has four right digits at least."""


def are_equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether one of the expressions of `gold` equals one of `answer`."""
    return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=_SECONDS))


def numbers_equal(a: Any, b: Any, float_rounding: int = 0, numeric_precision: int = 0) -> bool:
    """Whether two expressions or matrices are equal; takes the place of math-verify's own rule.

    Args:
        a: of sympy.
        b: of sympy.
        float_rounding: unused, as the digits of decimals are in `_are_close`.
        numeric_precision: unused, as exact values are compared exactly.
    """
    a, b = grader.safe_sympy_doit(a), grader.safe_sympy_doit(b)
    if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
        return getattr(a, "shape", 0) == getattr(b, "shape", 1) and all(
            map(numbers_equal, a.flat(), b.flat())
        )
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return bool(a == b)
    a, b = _complex(a), _complex(b)
    if a.has(sympy.Float) or b.has(sympy.Float):
        return _are_close(a, b)
    if a.is_number and b.is_number and not _are_near(a, b):
        return False
    return (a - b).equals(0) is not False if a.is_number and b.is_number else a.equals(b) is True


def _complex(value: sympy.Expr) -> sympy.Expr:
    """A number with the symbol i, if it has no other, as the complex number that people mean."""
    if {symbol.name for symbol in value.free_symbols} != {"i"}:
        return value
    return value.subs(dict.fromkeys(value.free_symbols, sympy.I))


def _are_close(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether values of which one is a decimal are equal to its sixth decimal."""
    if not (a.is_number and b.is_number):
        a, b = (sympy.nsimplify(each, rational=True) for each in (a, b))
        return a.equals(b) is True
    x, y = a.evalf(_DIGITS), b.evalf(_DIGITS)
    apart = abs(x - y)
    return bool(apart <= _HALF_DECIMAL and apart <= _SHARE * max(abs(x), abs(y)))


def _are_near(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether two exact numbers agree in 50 digits, which is cheaper than a proof."""
    if not (a.is_finite and b.is_finite):
        return bool(a == b)
    x, y = a.evalf(_DIGITS), b.evalf(_DIGITS)
    return bool(abs(x - y) <= _EXACT * max(abs(x), abs(y)))


def _without_percent(a: Any, b: Any, float_rounding: int = 0, numeric_precision: int = 0) -> bool:
    """As `numbers_equal`, and 9 % is 9 too, as people leave the sign out."""
    if all(grader.is_atomic_or_pct_atomic(each, sympy.Integer) for each in (a, b)):
        plain_a, plain_b = grader.get_pct_val(a, a), grader.get_pct_val(b, b)
        if plain_a == plain_b:
            return True
    return numbers_equal(a, b)


# Every comparison of math-verify, of the elements of its sets and matrices too, ends here.
assert callable(grader.sympy_numeric_eq)
grader.sympy_numeric_eq = _without_percent
