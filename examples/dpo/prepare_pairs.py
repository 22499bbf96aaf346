"""Make everything that the example needs from a file of HH-RLHF: pairs, tokenizer, random model.

    python examples/dpo/prepare_pairs.py --data FILE.jsonl.gz --out runs/dpo

HH-RLHF (Bai et al. 2022, https://arxiv.org/abs/2204.05862) holds dialogues in two versions, whose
last answers differ: one was preferred. `plimsoll dpo` reads such rows as they are; here they are
cut into `prompt`, `chosen` and `rejected` by the same rule, so that SFT can learn the chosen
answers first, and split at random into pairs to learn from and pairs to test on. The tokenizer and
the model are made from nothing, so all that the model ever sees are the pairs to learn from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from plimsoll.config.data import SourceConfig
from plimsoll.data.fields import BadRow, RawRow, RowProblem, settle
from plimsoll.data.pairs import pair_of
from plimsoll.data.sources import read_rows
from plimsoll.errors import PlimsollError
from plimsoll.model.tiny import train_tokenizer, write_scratch_model
from plimsoll.run.files import write_whole

COLUMNS = SourceConfig(path="hh-rlhf", chosen="chosen", rejected="rejected")


@dataclass(frozen=True)
class TextPair:
    """A row of the run's own files."""

    prompt: str
    chosen: str
    rejected: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    options = _options(arguments)
    out = Path(options.out)
    try:
        pairs, bad = read_pairs(options.data)
        train, test = split(pairs, options.test, options.seed)
        for name, rows in (("train", train), ("test", test)):
            lines = (json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
            write_whole(out / f"{name}.jsonl", "".join(lines))
        texts = (text for row in train for text in (row.prompt, row.chosen, row.rejected))
        write_scratch_model(
            out / "model",
            train_tokenizer(texts, options.vocabulary),
            vocabulary=options.vocabulary,
            hidden=options.hidden,
            layers=options.layers,
            seed=options.seed,
        )
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{out}: {len(train):,} pairs to learn from, {len(test):,} to test on, a random model")
    print(*(f"left out: {row}" for row in bad), sep="\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data", required=True, help="a file of HH-RLHF, such as harmless-base/test.jsonl.gz")
    add("--out", required=True, help="where pairs and model are written")
    add("--test", type=float, default=0.15, help="share of the pairs to test on (%(default)s)")
    add("--vocabulary", type=int, default=8192, help="tokens of the tokenizer (%(default)s)")
    add("--hidden", type=int, default=512, help="width of the model (%(default)s)")
    add("--layers", type=int, default=8, help="its layers (%(default)s)")
    add("--seed", type=int, default=0, help="of the split and the weights (%(default)s)")
    options = parser.parse_args(arguments)
    if not 0 < options.test < 1:
        parser.error(f"--test {options.test}: a share between 0 and 1 is needed")
    if options.vocabulary < 257:
        parser.error(
            f"--vocabulary {options.vocabulary}: 256 bytes and an end token need at least 257"
        )
    return options


def read_pairs(path: str) -> tuple[list[TextPair], list[BadRow]]:
    """The pairs of a file, and the rows that are none. Raises ConfigError for a file that cannot be
    read, DataError where no row is good."""
    read = [_pair(row) for row in read_rows(SourceConfig(path=path))]
    bad = [row for row in read if isinstance(row, BadRow)]
    settle(path, len(read), bad, "skip")
    return [row for row in read if isinstance(row, TextPair)], bad


def _pair(row: RawRow | BadRow) -> TextPair | BadRow:
    if isinstance(row, BadRow):
        return row
    try:
        pair = pair_of(row, COLUMNS, plain=True)
    except RowProblem as found:
        return BadRow(row.file, row.line, found.field, found.problem)
    prompt, chosen, rejected = (m[0]["content"] for m in (pair.prompt, pair.chosen, pair.rejected))
    return TextPair(prompt, chosen, rejected)


def split(
    pairs: Sequence[TextPair], share: float, seed: int
) -> tuple[list[TextPair], list[TextPair]]:
    """(to learn from, to test on): at random, but pairs with the same prompt on the same side."""
    prompts = sorted({pair.prompt for pair in pairs})
    order = np.random.default_rng(seed).permutation(len(prompts))
    held_out = {prompts[i] for i in order[: max(1, round(share * len(prompts)))]}
    train = [pair for pair in pairs if pair.prompt not in held_out]
    return train, [pair for pair in pairs if pair.prompt in held_out]


if __name__ == "__main__":
    sys.exit(main())
