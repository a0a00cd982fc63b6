"""The gateway's settings: their documentation names every built-in plug-in."""

from __future__ import annotations

import ast
import inspect

import pytest

from rollout.gateway import config
from rollout.gateway.dispatch import length_estimators, policies


def docstring_of(field: str) -> str:
    """The string literal after the field `field` of `GatewayConfig`."""
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(config)).body
        if isinstance(node, ast.ClassDef) and node.name == "GatewayConfig"
    )
    (index,) = (
        index
        for index, node in enumerate(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == field
    )
    literal = body[index + 1]
    assert isinstance(literal, ast.Expr)
    assert isinstance(literal.value, ast.Constant)
    return str(literal.value.value)


@pytest.mark.parametrize(
    ("field", "names"),
    [("dispatch", policies.BUILT_IN), ("lengths", length_estimators.BUILT_IN)],
)
def test_every_built_in_is_documented(field: str, names: dict[str, str]) -> None:
    """A new built-in policy or estimator has to be added to the docstring of its setting."""
    assert names
    assert [name for name in names if name not in docstring_of(field)] == []
