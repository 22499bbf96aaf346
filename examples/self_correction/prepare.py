"""Make everything that the example needs: sums, demonstrations, tokenizer, random model.

    python examples/self_correction/prepare.py --out runs/self_correction

The problems are the sums of `plimsoll demo`: two numbers of two digits, whose last digits carry,
added digit by digit with the sum after `####`. In a demonstration someone answers, is told whether
that is right, and answers again. Most forget the carry at first, and most of those once more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.commands.demo import SumProblem, problems
from plimsoll.environment.library.self_correction import SelfCorrection
from plimsoll.environment.protocol import Message, Reply
from plimsoll.model.tiny import write_chat_model
from plimsoll.run.json_lines import write_rows

TRAINING, HELD_OUT = 3500, 256
FIRST, SECOND = 0.2, 0.3
"""Shares of the demonstrations whose first answer is careful, and, where that is wrong, whose
second one is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", required=True, help="where rows and model are written")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    rng = np.random.default_rng(options.seed)
    found = list(problems(TRAINING + HELD_OUT, 2, options.seed))
    train, test = found[:TRAINING], found[TRAINING:]
    corrected = [demonstration(problem, rng) for problem in train]
    write_rows(out / "sft.jsonl", ({"messages": messages} for messages in corrected))
    for name, own in (("train", train), ("test", test)):
        rows = ({"problem": problem.prompt, "answer": problem.answer} for problem in own)
        write_rows(out / f"{name}.jsonl", rows)
    write_chat_model(out / "model", map(json.dumps, corrected), options.seed)
    print(f"{out}: {len(train):,} problems, {len(test):,} held out, and a random model")
    return 0


def demonstration(problem: SumProblem, rng: np.random.Generator) -> list[dict[str, Any]]:
    """The problem, an answer, what the environment says to it, and another answer."""
    careful = rng.random() < FIRST
    first = problem.worked_answer(careful).strip()
    environment = SelfCorrection()
    environment.reset({"reference": problem.answer})
    told = environment.step(Reply(first, Message("assistant", first), (), None)).observation
    second = problem.worked_answer(careful or rng.random() < SECOND).strip()
    return [
        {"role": "user", "content": problem.prompt},
        {"role": "assistant", "content": first},
        {"role": "user", "content": str(told)},
        {"role": "assistant", "content": second},
    ]


if __name__ == "__main__":
    sys.exit(main())
