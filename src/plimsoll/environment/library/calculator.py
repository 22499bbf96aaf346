"""A calculator as a tool, for arithmetic that a small model gets wrong without one."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 200
"""The most characters of an expression."""

MAX_DIGITS = 100
"""The most digits of the numerator or denominator of any number, intermediate ones included."""

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
    """An environment with one tool, a calculator; the row's prompt is the problem to solve.

    It gives no reward: the run's `rewards`, such as `exact_match`, score the last reply.
    """

    def reset(self, **row: Any) -> None:
        """Start an episode; this tool has no state and adds no text to the prompt."""

    def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses, such as (12 + 7) * 3
        """
        return format_number(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression.

    Raises ValueError if the text is not arithmetic, is too long, has no value (division by zero,
    a fractional exponent), or needs more than `MAX_DIGITS` digits. The policy reads the message.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"the expression has {len(expression)} characters, more than {MAX_CHARACTERS}"
        )
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    return _value(tree.body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_digits(_exact(number))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            try:
                return _check_digits(Fraction(_BINARY[type(node.op)](left, right)))
            except ZeroDivisionError as error:
                raise ValueError("division by zero") from error
    raise ValueError(f"{ast.unparse(node)[:100]!r} is no arithmetic")


def _exact(number: int | float) -> Fraction:
    """Return the number as it is written: 0.1 becomes 1/10, although the float differs a little."""
    if not math.isfinite(number):
        raise _too_long()
    return Fraction(repr(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("exponents must be whole numbers")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    size = max(abs(base.numerator), base.denominator)
    if size > 1 and abs(exponent) * math.log10(size) > MAX_DIGITS:
        raise _too_long()
    return _check_digits(Fraction(base ** int(exponent)))


def _check_digits(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise _too_long()
    return value


def _too_long() -> ValueError:
    return ValueError(f"a number has more than {MAX_DIGITS} digits")


def format_number(value: Fraction) -> str:
    """Return a fraction as decimal text: all digits if whole, else rounded to ten decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    tenths = round(abs(value) * 10**10)
    whole, decimals = divmod(tenths, 10**10)
    sign = "-" if value < 0 and tenths else ""
    return f"{sign}{whole}.{decimals:010d}".rstrip("0").rstrip(".")
