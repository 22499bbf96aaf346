r"""Write the rows of the example: sums, and if their files are given, GSM8K and pairs of HH-RLHF.

    python examples/smollm2/prepare.py --out runs/smollm2 --gsm8k DIR --pairs FILE.jsonl.gz

A sum asks "What is 17 + 8?" of two numbers from 1 to 30. GSM8K (Cobbe et al. 2021,
https://arxiv.org/abs/2110.14168) becomes questions with worked answers, without the calculator
marks (`<<48/2=24>>`). The pairs of HH-RLHF (Bai et al. 2022,
https://arxiv.org/abs/2204.05862) become prompts of several turns with two answers, and are split at
random by their prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from plimsoll.config.data import SourceConfig
from plimsoll.data.fields import BadRow, RawRow, RowProblem, settle
from plimsoll.data.pairs import pair_of
from plimsoll.data.sources import read_rows
from plimsoll.errors import PlimsollError
from plimsoll.run.json_lines import JsonRow, write_rows

LARGEST = 30
"""The largest number in a sum."""
HELD_OUT_SUMS = 200
HELD_OUT_PAIRS = 0.2
"""Share of the prompts of the pairs that are held out."""
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
MARKER = "#### "
COLUMNS = SourceConfig(path="hh-rlhf", chosen="chosen", rejected="rejected")

Rows = Sequence[JsonRow]
Splits = Mapping[str, Rows]
"""The rows of `train` and of `test`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="where the rows are written")
    parser.add_argument("--gsm8k", help="a directory with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--pairs", help="a file of HH-RLHF, such as harmless-base/test.jsonl.gz")
    parser.add_argument(
        "--longest", type=int, default=400, help="characters of a dialogue in pairs (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the splits (%(default)s)")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(options.seed)
    try:
        rows_by_name = {"sums": split_sums(rng)}
        if options.gsm8k:
            rows_by_name["gsm8k"] = {s: read_problems(options.gsm8k, s) for s in ("train", "test")}
        if options.pairs:
            rows_by_name["pairs"] = split_pairs(
                [row for row in read_pairs(options.pairs) if characters(row) <= options.longest],
                rng,
            )
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for name, splits in rows_by_name.items():
        for split, rows in splits.items():
            write_rows(options.out / name / f"{split}.jsonl", rows)
        print(
            f"{name}: {len(splits['train']):,} rows to learn from, {len(splits['test']):,} held out"
        )
    return 0


def split_sums(rng: np.random.Generator) -> Splits:
    """Return all sums in a random order, the first of them held out."""
    numbers = range(1, LARGEST + 1)
    sums = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b)}
        for a, b in itertools.product(numbers, numbers)
    ]
    shuffled = [sums[i] for i in rng.permutation(len(sums))]
    return {"test": shuffled[:HELD_OUT_SUMS], "train": shuffled[HELD_OUT_SUMS:]}


def read_problems(directory: str, split: str) -> Rows:
    """Return the problems of a split of GSM8K. Raises DataError for a row that is none."""
    path = f"{directory}/{split}.jsonl"
    read = [_problem(row) for row in read_rows(SourceConfig(path=path))]
    return _good_rows(path, read, "stop")


def _problem(row: RawRow | BadRow) -> JsonRow | BadRow:
    if isinstance(row, BadRow):
        return row
    question, answer = (str(row.values.get(name) or "") for name in ("question", "answer"))
    if not question or MARKER not in answer:
        return BadRow(row.file, row.line, "answer", f"is no answer with a last line `{MARKER}N`")
    return {
        "question": question,
        "response": CALCULATOR_MARK.sub("", answer),
        "answer": answer.rpartition(MARKER)[2].replace(",", ""),
    }


def read_pairs(path: str) -> Rows:
    """Return the pairs of a file, each with its prompt; rows that are no pairs are left out."""
    return _good_rows(path, [_pair(row) for row in read_rows(SourceConfig(path=path))], "skip")


def _pair(row: RawRow | BadRow) -> JsonRow | BadRow:
    if isinstance(row, BadRow):
        return row
    try:
        pair = pair_of(row, COLUMNS, plain=False)
    except RowProblem as found:
        return BadRow(row.file, row.line, found.field, found.problem)
    return {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}


def characters(pair: JsonRow) -> int:
    """Return how long the longer of a pair's two dialogues is."""
    prompt, *answers = (
        sum(len(message["content"]) for message in pair[column])
        for column in ("prompt", "chosen", "rejected")
    )
    return prompt + max(answers)


def _good_rows(
    path: str, read: Sequence[JsonRow | BadRow], on_bad_row: Literal["stop", "skip"]
) -> Rows:
    bad_rows = [row for row in read if isinstance(row, BadRow)]
    settle(path, len(read), bad_rows, on_bad_row)
    return [row for row in read if not isinstance(row, BadRow)]


def split_pairs(pairs: Rows, rng: np.random.Generator) -> Splits:
    """Return the pairs in a random order, those with the same prompt on the same side."""
    pairs_by_prompt: dict[str, list[JsonRow]] = {}
    for pair in pairs:
        pairs_by_prompt.setdefault(json.dumps(pair["prompt"]), []).append(pair)
    groups = list(pairs_by_prompt.values())
    shuffled = [groups[i] for i in rng.permutation(len(groups))]
    border = round(HELD_OUT_PAIRS * len(groups))
    sides = {"test": shuffled[:border], "train": shuffled[border:]}
    return {split: list(itertools.chain.from_iterable(side)) for split, side in sides.items()}


if __name__ == "__main__":
    sys.exit(main())
