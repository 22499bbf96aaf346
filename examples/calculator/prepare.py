"""Make everything that the example needs: problems, demonstrations, tokenizer, random model.

    python examples/calculator/prepare.py --out runs/calculator

A problem is a product of two numbers of three digits. Its demonstration calls the tool
`calculate`, reads the result and answers; but only a few of the teachers do it well. Others write
the wrong sign into the expression, and others still answer from memory, which fails them. For the
twin, which has no tool, each problem has a demonstration that gives the right answer at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.environment.library.calculator import Calculator, evaluate, format_number
from plimsoll.environment.tool_environment import schema_of
from plimsoll.model.tiny import write_chat_model
from plimsoll.run.json_lines import write_rows

TRAINING, HELD_OUT = 4000, 256
CAREFUL, WRONG_SIGN = 0.4, 0.4
"""Shares of the demonstrations; the others answer from memory."""
TOOLS = [schema_of(Calculator().calculate)]

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Problem:
    """A product of two numbers of three digits."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"What is {self.a} times {self.b}?"

    @property
    def answer(self) -> str:
        return str(self.a * self.b)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", required=True, help="where rows and model are written")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    rng = np.random.default_rng(options.seed)
    found = list(problems(TRAINING + HELD_OUT, rng))
    train, test = found[:TRAINING], found[TRAINING:]
    with_tool = [[asked(p), *demonstration(p, rng)] for p in train]
    direct = [[asked(p), said(f"#### {p.answer}")] for p in train]
    write_rows(out / "sft.jsonl", ({"messages": m, "tools": TOOLS} for m in with_tool))
    write_rows(out / "direct.jsonl", ({"messages": m} for m in direct))
    for name, own in (("train", train), ("test", test)):
        rows = ({"question": p.prompt, "answer": p.answer} for p in own)
        write_rows(out / f"{name}.jsonl", rows)
    texts = (json.dumps(conversation) for conversation in (TOOLS, *with_tool))
    write_chat_model(out / "model", texts, options.seed)
    print(f"{out}: {len(train):,} problems, {len(test):,} held out, and a random model")
    return 0


def problems(count: int, rng: np.random.Generator) -> Iterator[Problem]:
    """Different products, in a fixed random order."""
    seen: set[tuple[int, int]] = set()
    while len(seen) < count:
        a, b = (int(x) for x in rng.integers(100, 1000, size=2))
        if (a, b) not in seen:
            seen.add((a, b))
            yield Problem(a, b)


def demonstration(problem: Problem, rng: np.random.Generator) -> Messages:
    """What the assistant says to a problem, and the tool to it."""
    draw = rng.random()
    if draw >= CAREFUL + WRONG_SIGN:
        from_memory = int(problem.a * problem.b * rng.uniform(0.9, 1.1))
        return [said(f"#### {from_memory}")]
    sign = "*" if draw < CAREFUL else rng.choice(["+", "-"])
    expression = f"{problem.a}{sign}{problem.b}"
    result = format_number(evaluate(expression))
    function = {"name": "calculate", "arguments": {"expression": expression}}
    return [
        {**said(""), "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "calculate", "content": result},
        said(f"#### {result}"),
    ]


def asked(problem: Problem) -> dict[str, Any]:
    return {"role": "user", "content": problem.prompt}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    sys.exit(main())
