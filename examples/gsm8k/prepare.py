"""Make everything that the example needs from a copy of GSM8K: rows, tokenizer, random model.

    python examples/gsm8k/prepare.py --data DIR --out runs/gsm8k

GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) has 7,473 grade-school problems to
learn from and 1,319 to test on, with worked answers. The calculator marks of the original answers
(`<<48/2=24>>`) are left out: no calculator is called here. The tokenizer and the model are made
from nothing, so all that the model ever sees is the training split.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plimsoll.config.data import SourceConfig
from plimsoll.data.fields import BadRow, RawRow, settle
from plimsoll.data.sources import read_rows
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.model.tiny import train_tokenizer, write_scratch_model
from plimsoll.run.files import write_whole

SPLITS = ("train", "test")
MARKER = "#### "
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class Problem:
    """A row of the run's own files. question: the whole prompt. response: the worked answer; its
    last line is `#### N`, line break included, so that a response cut short has no such line.
    """

    question: str
    response: str
    answer: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    options = _options(arguments)
    out = Path(options.out)
    try:
        problems = {split: read_split(options.data, split) for split in SPLITS}
        for split, rows in problems.items():
            lines = (json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
            write_whole(out / f"{split}.jsonl", "".join(lines))
        texts = (text for p in problems["train"] for text in (p.question, p.response))
        tokenizer = train_tokenizer(texts, options.vocabulary)
        write_scratch_model(
            out / "model",
            tokenizer,
            vocabulary=options.vocabulary,
            hidden=options.hidden,
            layers=options.layers,
            seed=options.seed,
        )
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    counts = ", ".join(f"{len(rows):,} {split}" for split, rows in problems.items())
    print(f"{out}: {counts} problems, a vocabulary of {len(tokenizer):,}, and a random model")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data", required=True, help="your copy of GSM8K: train.jsonl and test.jsonl")
    add("--out", required=True, help="where rows and model are written")
    add("--vocabulary", type=int, default=8192, help="tokens of the tokenizer (%(default)s)")
    add("--hidden", type=int, default=512, help="width of the model (%(default)s)")
    add("--layers", type=int, default=8, help="its layers (%(default)s)")
    add("--seed", type=int, default=0, help="of its weights (%(default)s)")
    options = parser.parse_args(arguments)
    if options.vocabulary < 257:
        parser.error(
            f"--vocabulary {options.vocabulary}: 256 bytes and an end token need at least 257"
        )
    if options.hidden < 16 or options.hidden % 16:
        parser.error(f"--hidden {options.hidden}: 8 heads of even size need a multiple of 16")
    if options.layers < 1:
        parser.error(f"--layers {options.layers}: at least 1 is needed")
    return options


def read_split(data: str, split: str) -> list[Problem]:
    """The problems of a split, in the file's order. Raises ConfigError where the file is not
    there, DataError where rows are not GSM8K's."""
    file = Path(data).expanduser() / f"{split}.jsonl"
    if not file.is_file():
        raise ConfigError(
            f"--data {data}: there is no {file.absolute()}. Give the directory that holds "
            f"train.jsonl and test.jsonl of GSM8K, one JSON object a line with `question` and "
            f"`answer`, from https://github.com/openai/grade-school-math"
        )
    read = [_problem(row) for row in read_rows(SourceConfig(path=str(file)))]
    settle(str(file), len(read), [r for r in read if isinstance(r, BadRow)], "stop")
    return [row for row in read if isinstance(row, Problem)]


def _problem(row: RawRow | BadRow) -> Problem | BadRow:
    if isinstance(row, BadRow):
        return row
    question, answer = row.values.get("question"), row.values.get("answer")
    if not isinstance(question, str) or not question.strip():
        return BadRow(row.file, row.line, "question", "is missing, empty or no text")
    if not isinstance(answer, str) or MARKER not in answer:
        return BadRow(row.file, row.line, "answer", f"is no text with a last line `{MARKER}N`")
    return Problem(
        question=f"Question: {question.strip()}\nAnswer:",
        response=worked_answer(answer),
        answer=final_number(answer),
    )


def worked_answer(answer: str) -> str:
    """The response that is learned: GSM8K's text without calculator marks, the last line `#### N`.

    The space in front belongs to the first word, as between any two words.
    """
    working, _, _ = answer.rpartition(MARKER)
    plain = CALCULATOR_MARK.sub("", working).strip()
    return f" {plain}\n{MARKER}{final_number(answer)}\n"


def final_number(answer: str) -> str:
    """What stands after the last `####`, without the commas between thousands."""
    return answer.rpartition(MARKER)[2].strip().replace(",", "")


if __name__ == "__main__":
    sys.exit(main())
