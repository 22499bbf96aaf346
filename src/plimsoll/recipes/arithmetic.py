"""The demo's task: adding numbers, digit by digit, with the carry written out.

A problem is `47+85=`. A worked answer goes from the last digit to the first, each step with the
carry that it hands on, and ends with the sum:

    47+85= 7+5+0=12 4+8+1=13 #### 132

Every character is a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from plimsoll.run.files import write_whole

ALPHABET = "0123456789+=# "
END = "<end>"


@dataclass(frozen=True)
class Problem:
    """Two numbers with the same number of digits."""

    a: int
    b: int
    digits: int

    @property
    def prompt(self) -> str:
        return f"{self.a:0{self.digits}d}+{self.b:0{self.digits}d}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    def worked(self) -> str:
        """The steps, then the sum."""
        steps, carry = [], 0
        for place in range(self.digits):
            x, y = self.a // 10**place % 10, self.b // 10**place % 10
            total = x + y + carry
            steps.append(f"{x}+{y}+{carry}={total}")
            carry = total // 10
        return f" {' '.join(steps)} #### {self.answer}"


def problems(count: int, digits: int, seed: int) -> Iterator[Problem]:
    """Different problems, in a fixed random order."""
    assert count <= 10 ** (2 * digits)
    rng = np.random.default_rng(seed)
    seen: set[tuple[int, int]] = set()
    while len(seen) < count:
        a, b = (int(x) for x in rng.integers(10**digits, size=2))
        if (a, b) not in seen:
            seen.add((a, b))
            yield Problem(a, b, digits)


def write_problems(path: Path, found: list[Problem]) -> None:
    """A JSON line a problem: prompt, worked response, answer."""
    rows = [{"prompt": p.prompt, "response": p.worked(), "answer": p.answer} for p in found]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character of the task, and one that ends a response."""
    vocabulary = {character: i for i, character in enumerate(ALPHABET)} | {END: len(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
