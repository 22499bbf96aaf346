"""How long the rows of a large source take to become samples, and what the process then holds.

    python benchmarks/large_data.py --model runs/demo/model [--rows 200000] [--tokens 200]

Conversations of random words, of about so many tokens; as JSON lines, packed JSON lines and
Parquet, each read in a process of its own. Prints seconds, and resident memory beyond that of a
process which has read ten rows: at its peak, and held in the end.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow.json
import pyarrow.parquet as pq

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_samples
from plimsoll.data.stored import token_counts
from plimsoll.data.template import make_template
from plimsoll.machine.processes import process_bytes, process_peak_bytes, reset_process_peak
from plimsoll.model.load import load_tokenizer
from plimsoll.records import Sample

MOST_TOKENS = 1 << 20
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"


def conversations(rows: int, words: int) -> Iterator[str]:
    """A line each."""
    rng = random.Random(0)
    for _ in range(rows):
        asked, said = (" ".join(str(rng.randrange(100)) for _ in range(words)) for _ in range(2))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        yield json.dumps({"messages": turns}) + "\n"


def measure(model: str, file: Path) -> str:
    """Read the file, as a run does."""
    template = make_template(load_tokenizer(model, trust_remote_code=False), TEMPLATE, None)

    def load(limit: int | None) -> Sequence[Sample]:
        source = SourceConfig(path=str(file), messages="messages", limit=limit)
        data = DataConfig(train=source, max_tokens=MOST_TOKENS, cache="none", processes=1)
        return load_samples(data, source, template).items

    load(10)
    before, start = process_bytes(), time.perf_counter()
    reset_process_peak()
    samples = load(None)
    seconds = time.perf_counter() - start
    peak, held = process_peak_bytes() - before, process_bytes() - before
    tokens = int(token_counts(samples).sum())
    return f"{tokens:>12,} tokens {seconds:7.1f} s {peak / 1e6:8,.0f} MB {held / 1e6:8,.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="whose tokenizer")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=200, help="of a row, about")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, packed, parquet = (
            Path(folder) / f"rows{suffix}" for suffix in (".jsonl", ".jsonl.gz", ".parquet")
        )
        with plain.open("w") as lines:
            lines.writelines(conversations(asked.rows, asked.tokens // 6))
        packed.write_bytes(gzip.compress(plain.read_bytes(), compresslevel=1))
        pq.write_table(pyarrow.json.read_json(plain), parquet)
        for file in (plain, packed, parquet):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
                print(f"{file.name:<14}{apart.submit(measure, asked.model, file).result()}")


if __name__ == "__main__":
    main()
