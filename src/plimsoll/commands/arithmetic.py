"""The task of the demo: adding numbers digit by digit, with the carry written out.

A problem is `47+85=`. A worked answer adds the digits from the last to the first. Each addition
includes the carry from the addition before it. The answer ends with the sum:

`47+85= 7+5+0=12 4+8+1=13 #### 132`

In every problem the last digits carry. Most demonstrations are careless: they forget every carry
and get 122. A model that imitates all demonstrations is right less than half of the time. A reward
for the correct sum favours the careful answers. Every character is a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from plimsoll.run.files import write_whole

ALPHABET = "0123456789+=# "
END = "<end>"


@dataclass(frozen=True)
class SumProblem:
    """Two numbers with the same number of digits."""

    a: int
    b: int
    digits: int

    @property
    def prompt(self) -> str:
        """The problem, such as `47+85=`."""
        return f"{self.a:0{self.digits}d}+{self.b:0{self.digits}d}="

    @property
    def answer(self) -> str:
        """The correct sum."""
        return str(self.a + self.b)

    def worked_answer(self, careful: bool) -> str:
        """Return the additions and the sum as text; a careless answer forgets every carry."""
        steps, carry, total, answer = [], 0, 0, 0
        for place in range(self.digits):
            x, y = self.a // 10**place % 10, self.b // 10**place % 10
            total = x + y + carry
            steps.append(f"{x}+{y}+{carry}={total}")
            carry = total // 10 if careful else 0
            answer += total % 10 * 10**place
        answer += total // 10 * 10**self.digits
        return f" {' '.join(steps)} #### {answer}"


def problems(count: int, digits: int, seed: int) -> Iterator[SumProblem]:
    """Yield `count` different problems whose last digits carry; `seed` determines all of them."""
    assert count <= 10 ** (2 * digits) * 45 // 100
    rng = np.random.default_rng(seed)
    seen: set[tuple[int, int]] = set()
    while len(seen) < count:
        a, b = (int(x) for x in rng.integers(10**digits, size=2))
        if a % 10 + b % 10 > 9 and (a, b) not in seen:
            seen.add((a, b))
            yield SumProblem(a, b, digits)


def write_problems(path: Path, chosen: Sequence[SumProblem], careless: float, seed: int) -> None:
    """Write a JSON line per problem: prompt, demonstration (`response`) and correct answer.

    `careless` is the share of careless demonstrations, 0 to 1.
    """
    draws = np.random.default_rng(seed).random(len(chosen))
    rows = [
        {
            "prompt": p.prompt,
            "response": p.worked_answer(careful=draw >= careless),
            "answer": p.answer,
        }
        for p, draw in zip(chosen, draws, strict=True)
    ]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(path: Path, chosen: Sequence[SumProblem]) -> None:
    """Write a JSON line per problem: prompt, careful answer and careless answer."""
    rows = [
        {"prompt": p.prompt, "careful": p.worked_answer(True), "careless": p.worked_answer(False)}
        for p in chosen
    ]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character, and a token that ends a response.

    It is byte-level BPE without merges. Qwen2's tokenizers are byte-level BPE, so all programs that
    load the model read this tokenizer in the same way.
    """
    mapped = [token for token, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(ALPHABET)]
    characters = [*"".join(mapped), END]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
