"""A calculator as a tool, for problems that a small model cannot do in its head."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeGuard

LONGEST = 200
"""Characters of an expression."""

MOST_DIGITS = 100
"""Of a number on the way and of a result."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})


class Calculator:
    """The row's prompt gives the problem. The reward is the run's own, such as `exact_match` or
    `math_answer`, of the last thing that is said."""

    def reset(self, **row: Any) -> None:
        """Nothing is added to the prompt."""

    def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses, such as (12 + 7) * 3
        """
        return written(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression.

    Raises ValueError, in words for the policy, for anything else, for what has no value, and for
    numbers of more than `MOST_DIGITS` digits.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, more than {LONGEST}")
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    return _value(tree.body)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and _is_number(node.value):
        return _bounded(_exact(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            try:
                return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
            except ZeroDivisionError as error:
                raise ValueError("division by zero") from error
    raise ValueError(f"{ast.unparse(node)[:100]!r} is no arithmetic")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _exact(number: int | float) -> Fraction:
    """0.1 is a tenth; Python's own 0.1 is not."""
    if not math.isfinite(number):
        raise _too_long()
    return Fraction(repr(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("exponents must be whole numbers")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    size = max(abs(base.numerator), base.denominator)
    if size > 1 and abs(exponent) * math.log10(size) > MOST_DIGITS:
        raise _too_long()
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise _too_long()
    return value


def _too_long() -> ValueError:
    return ValueError(f"a number has more than {MOST_DIGITS} digits")


def written(value: Fraction) -> str:
    """A whole number as it is, another one with at most ten decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    tenths = round(abs(value) * 10**10)
    whole, decimals = divmod(tenths, 10**10)
    sign = "-" if value < 0 and tenths else ""
    return f"{sign}{whole}.{decimals:010d}".rstrip("0").rstrip(".")
