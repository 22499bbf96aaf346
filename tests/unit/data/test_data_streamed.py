"""Streams: items that are made when they are drawn, in an order that depends on rows and seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig
from plimsoll.data import streamed
from plimsoll.data.dataset import load_pairs, load_samples
from plimsoll.data.loading import Observer
from plimsoll.data.stored import column_of, fingerprint
from plimsoll.data.streamed import BlockCounts, StreamedRows
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError, DataError

SEED = (3, 0)


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "BLOCK_ROWS", 4)
    monkeypatch.chdir(tmp_path)


def write(rows: Sequence[object]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def stream(tokenizer: Tokenizer, notes: list[str] | None = None, **data: Any) -> StreamedRows[Any]:
    columns = {"prompt": "q", "response": "a"} if "text" not in data else {"text": data.pop("text")}
    train = {"path": "rows.jsonl", "streaming": True, **columns}
    config = DataConfig.model_validate({"train": train, **data})
    [source] = config.train_sources().values()
    observer = Observer(note=(notes if notes is not None else []).append)
    items = load_samples(config, source, make_template(tokenizer, None, None), observer).items
    assert isinstance(items, StreamedRows)
    return items


def answers(items: Sequence[Any], tokenizer: Tokenizer, *places: int) -> list[str]:
    texts = (tokenizer.decode(items[i].tokens[items[i].loss_mask]) for i in places)
    return [text.removesuffix("<|im_end|>") for text in texts]


ROWS = [{"q": "?", "a": letter} for letter in "abcdefghij"]
COUNTS = Path("streams.jsonl")


def begun(tokenizer: Tokenizer, seed: Sequence[int] | None = SEED) -> StreamedRows[Any]:
    items = stream(tokenizer)
    items.begin(seed, BlockCounts(COUNTS, "data.train"))
    return items


def test_blocks_come_in_order_and_again_from_the_first_on(tokenizer: Tokenizer) -> None:
    write(ROWS)
    drawn = answers(begun(tokenizer, None), tokenizer, *range(13))
    assert "".join(drawn) == "abcdefghijabc"
    rows = [json.loads(line) for line in COUNTS.read_text().splitlines()]
    assert rows == [
        {"source": "data.train", "block": i, "items": n} for i, n in enumerate([4, 4, 2, 4])
    ]


def test_items_are_shuffled_within_a_block(tokenizer: Tokenizer) -> None:
    write(ROWS)
    drawn = "".join(answers(begun(tokenizer), tokenizer, *range(40)))
    for start in range(0, 40, 10):
        blocks = (drawn[start : start + 4], drawn[start + 4 : start + 8], drawn[start + 8 :][:2])
        assert [*map(Counter, blocks)] == [*map(Counter, ("abcd", "efgh", "ij"))]
    assert len({drawn[start : start + 10] for start in range(0, 40, 10)}) == 4
    COUNTS.unlink()
    assert "".join(answers(begun(tokenizer), tokenizer, *range(40))) == drawn
    COUNTS.unlink()
    assert "".join(answers(begun(tokenizer, (4, 0)), tokenizer, *range(40))) != drawn


@pytest.mark.parametrize("keeps_counts", [True, False])
def test_a_resumed_stream_goes_on_exactly(
    tokenizer: Tokenizer, keeps_counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the counts, no block is tokenised but the first one and those that are drawn from."""
    write(ROWS)
    drawn = answers(begun(tokenizer), tokenizer, *range(30))
    if not keeps_counts:
        COUNTS.unlink()
    items = begun(tokenizer)
    made, make = list[int](), items._make

    def note(block: Sequence[Any]) -> Sequence[Any]:
        made.append(len(block))
        return make(block)

    monkeypatch.setattr(items, "_make", note)
    assert answers(items, tokenizer, *range(17, 20)) == drawn[17:20]
    assert made == ([4, 2] if keeps_counts else [4, 2, 4, 4, 2])
    assert answers(items, tokenizer, 1, 29, 12) == [drawn[i] for i in (1, 29, 12)]


@pytest.mark.parametrize("rows", [ROWS[:9], [*ROWS, ROWS[0]]])
def test_a_stream_whose_rows_were_changed_does_not_go_on(
    tokenizer: Tokenizer, rows: Sequence[object]
) -> None:
    """Blocks begin elsewhere then, so rows would be lost or drawn twice."""
    write(ROWS)
    answers(begun(tokenizer), tokenizer, *range(30))
    write(rows)
    with pytest.raises(ConfigError, match=r"data\.train: block 2 .* gave 2"):
        answers(begun(tokenizer), tokenizer, 9)


def test_a_stream_that_has_no_rows_any_more_ends(tokenizer: Tokenizer) -> None:
    write(ROWS)
    items = begun(tokenizer)
    write([])
    with pytest.raises(DataError, match="none any more"):
        answers(items, tokenizer, *range(12))


def test_documents_and_bad_rows_give_any_number_of_items(tokenizer: Tokenizer) -> None:
    texts = ["abc", "", "d", "", "", "", "", "", "efghi"]
    write([{"t": text} for text in texts])
    notes = list[str]()
    items = stream(tokenizer, notes, text="t", on_bad_row="skip", max_tokens=3)
    items.begin(None, BlockCounts(COUNTS, "data.train"))
    expected = [*["abc", "d", "efghi"]]
    pieces = [tokenizer.decode(items[i].tokens) for i in range(12)]
    firsts = [piece[0] for piece in pieces]
    assert firsts[:3] == ["a", "c", "d"] and firsts[3] == "e"
    assert "".join(dict.fromkeys("".join(pieces).replace("<|im_end|>", ""))) == "".join(expected)
    counts = [json.loads(line)["items"] for line in COUNTS.read_text().splitlines()]
    assert counts[:3] == [3, 0, 3] and counts[3:4] == [3]
    assert any("skipped 4 rows of a stream" in note for note in notes)
    assert any("skipped 2 bad rows" in note for note in notes)


def test_a_bad_row_stops_the_run_when_its_block_is_reached(tokenizer: Tokenizer) -> None:
    write([*ROWS[:5], {"q": "?", "a": ""}])
    items = begun(tokenizer)
    items[3]
    with pytest.raises(DataError, match=r"1 of 2 rows .*\n  rows.jsonl:6: a: is empty"):
        items[4]
    write([{"q": "?", "a": ""}])
    with pytest.raises(DataError, match=r"rows.jsonl:1: a: is empty"):
        stream(tokenizer)
    write([])
    with pytest.raises(DataError, match="holds no rows"):
        stream(tokenizer)


def test_what_is_known_of_a_stream_is_its_first_block(tokenizer: Tokenizer) -> None:
    write(ROWS)
    items = begun(tokenizer)
    assert len(items) == 2**40 and len(column_of(items, "key")) == 4
    print_ = fingerprint(items)
    write([*ROWS[:4], {"q": "!", "a": "z"}])
    assert fingerprint(begun(tokenizer)) == print_
    write([*ROWS[1:]])
    assert fingerprint(begun(tokenizer)) != print_


def test_a_line_that_was_torn_is_no_count(tokenizer: Tokenizer) -> None:
    write(ROWS)
    drawn = answers(begun(tokenizer), tokenizer, *range(12))
    COUNTS.write_bytes(COUNTS.read_bytes()[:-3])
    assert BlockCounts(COUNTS, "data.train").read() == [4, 4, 2]
    assert BlockCounts(COUNTS, "data.train.other").read() == []
    assert answers(begun(tokenizer), tokenizer, *range(12)) == drawn
    assert BlockCounts(COUNTS, "data.train").read() == [4, 4, 2, 4]


def test_pairs_can_be_streamed(tokenizer: Tokenizer) -> None:
    write([{"q": "?", "a": "yes", "b": "no"}])
    columns = {"prompt": "q", "chosen": "a", "rejected": "b"}
    train = {"path": "rows.jsonl", "streaming": True, **columns}
    data = DataConfig.model_validate({"train": train})
    [source] = data.train_sources().values()
    items = load_pairs(data, source, make_template(tokenizer, None, None)).items
    assert tokenizer.decode(items[7].rejected.tokens).endswith("no<|im_end|>\n")


def test_reading_begins_again_only_at_the_end() -> None:
    opened = list[int]()

    def read() -> Iterator[int]:
        opened.append(1)
        yield from range(6)

    blocks = streamed.read_blocks(read)
    assert [next(blocks) for _ in range(3)] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]
    assert len(opened) == 2
