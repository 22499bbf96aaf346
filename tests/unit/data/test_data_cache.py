"""Tokenised rows that are kept: what they are, when they are those of a source, who makes them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data import cache, loading, several
from plimsoll.data.dataset import (
    load_pairs,
    load_prompts,
    load_responses,
    load_samples,
    load_scored_pairs,
    load_steps,
)
from plimsoll.data.loading import Loaded, Observer
from plimsoll.data.stored import (
    JoinedRows,
    StoredRows,
    column_of,
    encode,
    fingerprint,
    hashed_parts,
    learned_tokens,
    number_prompt,
    token_counts,
)
from plimsoll.data.template import make_template
from plimsoll.errors import DataError
from plimsoll.records import (
    LabelledResponse,
    LabelledSteps,
    Pair,
    Prompt,
    Row,
    Sample,
)

ROW = {
    "q": "hi", "a": "yo", "b": "no", "good": True, "m": 0.5, "s": ["a", "b"], "l": [0, 0.5],
    "more": [1, {"x": None}], "ref": {"x": 0.1},
}  # fmt: skip
Load = Callable[..., Loaded[Any]]
KINDS: dict[str, tuple[Load, dict[str, str]]] = {
    "samples": (load_samples, {"prompt": "q", "response": "a"}),
    "documents": (load_samples, {"text": "a"}),
    "pairs": (load_pairs, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "m"}),
    "scored pairs": (load_scored_pairs, {"prompt": "q", "chosen": "a", "rejected": "b"}),
    "responses": (load_responses, {"prompt": "q", "response": "a", "label": "good"}),
    "responses of pairs": (load_responses, {"prompt": "q", "chosen": "a", "rejected": "b"}),
    "steps": (load_steps, {"prompt": "q", "steps": "s", "labels": "l"}),
    "prompts": (load_prompts, {"prompt": "q", "reference": "ref", "order_by": "m"}),
}


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any size are kept, in a directory of the test's own."""
    monkeypatch.setattr(cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(cache, "FEW_ROWS", 0)
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def settings(rows: Sequence[object], named: dict[str, Any], **data: Any) -> DataConfig:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"train": {"path": "rows.jsonl", **named}, "on_bad_row": "skip", **data}
    return DataConfig.model_validate(values)


def load(tokenizer: Tokenizer, data: DataConfig, kind: str = "samples", **more: Any) -> Loaded[Any]:
    [source] = data.train_sources().values()
    template = make_template(tokenizer, data.chat_template, data.system, date=data.date)
    return KINDS[kind][0](data, source, template, **more)


def entries() -> list[Path]:
    return sorted(path for path in Path("cache").glob("rows-*") if path.is_dir())


def plain(item: Any) -> Any:
    """Return an item as values that can be compared."""
    if isinstance(item, np.ndarray):
        return item.tolist()
    if isinstance(item, Sample | Pair | LabelledResponse | LabelledSteps | Prompt):
        return [plain(getattr(item, field.name)) for field in fields(item)]
    return item


@pytest.mark.parametrize("kind", KINDS)
def test_items_are_the_same_from_memory_and_from_the_cache(
    kind: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [ROW, {**ROW, "q": ""}, {**ROW, "q": "ä", "a": "yo" * 9, "s": ["c", "d"], "m": 0.25}]
    rows = [{**row, "a": ""} if not row["q"] else row for row in rows]
    named = KINDS[kind][1]
    held = load(tokenizer, settings(rows, named, cache="none"), kind)
    assert not entries() and len(held.bad_rows) == 1
    made = load(tokenizer, settings(rows, named), kind)
    [entry] = entries()
    monkeypatch.setattr(loading, "read_rows", None)  # no row is read once more
    kept = load(tokenizer, settings(rows, named), kind)
    assert entries() == [entry]
    for loaded in (made, kept):
        assert [*map(plain, loaded.items)] == [*map(plain, held.items)]
        assert loaded.bad_rows == held.bad_rows and loaded.cut_rows == held.cut_rows
        assert fingerprint(loaded.items) == fingerprint([*held.items])
    first = kept.items[0]
    assert all(s.tokens.flags.writeable for s in ([first] if kind == "prompts" else first.samples))


def test_a_prompt_keeps_all_that_a_row_has(tokenizer: Tokenizer) -> None:
    columns = {"n": 10**30, "f": 0.1, "nan": float("nan"), "none": [None], "half": "\ud800"}
    row = {"q": [{"role": "user", "content": "hi", "more": [1]}], "ref": [1, "x"], **columns}
    data = settings([row], {"prompt": "q", "reference": "ref"})
    for _ in range(2):
        [prompt] = load(tokenizer, data, "prompts").items
        assert repr(prompt.columns) == repr(columns)
        assert prompt.named == {"q": row["q"], "ref": [1, "x"]}
        assert prompt.messages == ({"role": "user", "content": "hi", "more": [1]},)
        assert prompt.reference == '[1, "x"]' and prompt.given_reference == [1, "x"]
        assert prompt.index == 0 and prompt.max_new_tokens is prompt.order_by is None


def test_what_is_no_json_in_a_turn_is_text_as_in_a_template(tokenizer: Tokenizer) -> None:
    turn = {"role": "user", "content": "hi", "when": date(2026, 1, 2)}
    pq.write_table(pa.table({"q": [[turn]]}), "rows.parquet")
    source = SourceConfig(path="rows.parquet", messages="q")
    template = make_template(tokenizer, None, None)
    [prompt] = load_prompts(DataConfig(train=source), source, template).items
    assert prompt.messages[0]["when"] == "2026-01-02"


ANSWERS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"train": {"weight": 2.0}}, {"same": True}),
    ({"shuffle": False}, {"same": True}),
    ({"processes": 3}, {"same": True}),
    ({"date": "2026-01-01"}, {"same": True}),  # this template does not write it
    ({"max_tokens": 99}, {"same": False}),
    ({"system": "Be brief."}, {"same": False}),
    ({"chat_template": "none"}, {"same": False}),
    ({"on_bad_row": "stop"}, {"same": False}),
    ({"train": {"limit": 1}}, {"same": False}),
)


def test_rows_are_those_of_the_settings_that_decide_about_them(tokenizer: Tokenizer) -> None:
    named = KINDS["samples"][1]
    load(tokenizer, settings([ROW, ROW], named))
    for changed, expected in ANSWERS:
        before = len(entries())
        more = {key: value for key, value in changed.items() if key != "train"}
        columns = {**named, **changed.get("train", {})}
        columns.pop("weight", None)
        load(tokenizer, settings([ROW, ROW], columns, **more))
        assert (len(entries()) == before) == expected["same"], changed


def test_rows_are_those_of_the_files_bytes(tokenizer: Tokenizer) -> None:
    """A file that is as long as before, and as old, is another one if a byte differs."""
    named = KINDS["samples"][1]
    first = load(tokenizer, settings([{**ROW, "a": "yo"}], named))
    times = os.stat("rows.jsonl")
    data = settings([{**ROW, "a": "ya"}], named)
    os.utime("rows.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    second = load(tokenizer, data)
    assert len(entries()) == 2
    assert first.items[0].tokens.tolist() != second.items[0].tokens.tolist()


def test_a_template_that_writes_the_time_of_rendering_keeps_no_rows(tokenizer: Tokenizer) -> None:
    clock = "{{ strftime_now('%H') }}" + str(tokenizer.chat_template)
    named = KINDS["samples"][1]
    load(tokenizer, settings([ROW], named, chat_template=clock))
    assert not entries()


def test_rows_are_those_of_what_a_template_writes_of_the_date(tokenizer: Tokenizer) -> None:
    named, written = KINDS["samples"][1], str(tokenizer.chat_template)
    day, any_ = "{{ strftime_now('%d %b') }}", "{% set f = '%d' %}{{ strftime_now(f) }}"
    dates = ("2026-01-01T08:00:00", "2026-01-01T09:00:00", "2026-01-02T09:00:00")
    for clock, counts in ((day, (1, 1, 2)), (any_, (3, 4, 5))):
        for moment, count in zip(dates, counts, strict=True):
            load(tokenizer, settings([ROW], named, chat_template=clock + written, date=moment))
            assert len(entries()) == count


def test_a_few_rows_of_a_file_are_not_looked_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "FEW_ROWS", 1)
    load(tokenizer, settings([ROW, ROW], {**KINDS["samples"][1], "limit": 1}))
    assert not entries()


def shorten(entry: Path) -> None:
    file = entry / "rows.arrow"
    file.write_bytes(file.read_bytes()[:-9])


def flip(entry: Path) -> None:
    file = entry / "rows.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "shorter": shorten,
    "a bit": flip,
    "no rows": lambda entry: (entry / "rows.arrow").unlink(),
    "no facts": lambda entry: (entry / "facts.json").unlink(),
    "half the facts": lambda entry: (entry / "facts.json").write_text('{"checksum": "'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_are_made_anew(damage: str, tokenizer: Tokenizer) -> None:
    data, notes = settings([ROW, ROW], KINDS["samples"][1]), list[str]()
    load(tokenizer, data)
    [entry] = entries()
    DAMAGES[damage](entry)
    loaded = load(tokenizer, data, observer=Observer(note=notes.append))
    assert len(loaded.items) == 2 and len(notes) == 1
    assert str(entry) in notes[0] and "is damaged" in notes[0]
    load(tokenizer, data, observer=Observer(note=notes.append))
    assert len(notes) == 1 and entries() == [entry]


def test_rows_that_stop_a_run_are_not_kept(tokenizer: Tokenizer) -> None:
    data = settings([ROW, {**ROW, "a": ""}], KINDS["samples"][1], on_bad_row="stop")
    for _ in range(2):
        with pytest.raises(DataError, match=r"rows.jsonl:2: a: is empty"):
            load(tokenizer, data)
    assert not entries() and not [*Path("cache").glob(".rows*")]


def test_what_a_killed_process_left_is_removed_after_a_day(tokenizer: Tokenizer) -> None:
    """A young one may be that of a process of another node."""
    data = settings([ROW], KINDS["samples"][1])
    load(tokenizer, data)
    [entry] = entries()
    for age, is_left in ((0, True), (25 * 3600, False)):
        entry.rename(leftover := entry.with_name(f".{entry.name}.partial-12345678"))
        os.utime(leftover, (time.time() - age,) * 2)
        load(tokenizer, data)
        assert entries() == [entry] and leftover.exists() == is_left
        shutil.rmtree(leftover, ignore_errors=True)


def test_an_entry_that_cannot_be_written_stops_no_run(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyarrow.ipc.new_file", fill)
    data, notes = settings([ROW, ROW], KINDS["samples"][1]), list[str]()
    loaded = load(tokenizer, data, observer=Observer(note=notes.append))
    assert len(loaded.items) == 2 and not entries()
    assert len(notes) == 1 and "data.cache" in notes[0]


def test_an_entry_is_its_owners_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, notes = settings([ROW], KINDS["samples"][1]), list[str]()
    load(tokenizer, data)
    assert Path("cache").stat().st_mode & 0o777 == 0o700
    own = os.getuid()
    os.chown(entries()[0], own + 1, -1) if own == 0 else monkeypatch.setattr(
        os, "getuid", lambda: own + 1
    )
    load(tokenizer, data, observer=Observer(note=notes.append))
    assert any("another user" in note for note in notes)


def test_a_file_that_comes_while_rows_are_made_is_no_part_of_what_is_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rows").mkdir()
    settings([ROW], KINDS["samples"][1])
    Path("rows.jsonl").rename("rows/train-0.jsonl")
    train = {"path": "rows", **KINDS["samples"][1]}
    data = DataConfig.model_validate({"train": train})
    read: Any = vars(loading)["read_rows"]

    def add(*arguments: Any, **named: Any) -> Any:
        shutil.copy("rows/train-0.jsonl", "rows/train-1.jsonl")
        return read(*arguments, **named)

    monkeypatch.setattr(loading, "read_rows", add)
    assert len(load(tokenizer, data).items) == 2 and not entries()


def test_one_process_makes_rows_and_others_wait(tokenizer: Tokenizer) -> None:
    data, notes = settings([ROW], KINDS["samples"][1]), list[str]()
    load(tokenizer, data)
    [entry] = entries()
    aside = entry.rename(entry.with_name("aside"))
    waits = threading.Event()

    def note(text: str) -> None:
        notes.append(text)
        waits.set()

    with FileLock(entry.with_suffix(".lock"), thread_local=False) as lock:
        result = list[Loaded[Any]]()
        thread = threading.Thread(
            target=lambda: result.append(load(tokenizer, data, observer=Observer(note=note)))
        )
        thread.start()
        assert waits.wait(60)
        aside.rename(entry)  # as the other process does, in the end
        inode = entry.stat().st_ino
        lock.release()
    thread.join()
    assert len(result[0].items) == 1 and entry.stat().st_ino == inode
    assert notes == [f"waiting for another process, which makes {entry.absolute()}"]


def test_rows_are_made_where_nothing_can_be_kept(tokenizer: Tokenizer) -> None:
    Path("file").write_text("")
    data, notes = settings([ROW], KINDS["samples"][1], cache="file/within"), list[str]()
    loaded = load(tokenizer, data, observer=Observer(note=notes.append))
    assert len(loaded.items) == 1
    assert len(notes) == 1 and "data.cache" in notes[0]


def test_few_rows_are_not_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LEAST_BYTES", 2**22)
    load(tokenizer, settings([ROW], KINDS["samples"][1]))
    assert not entries()


def test_several_processes_make_the_same_rows(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "steps"
    rows = [{**ROW, "q": f"{i}?" if i % 5 else ""} for i in range(23)]
    named = KINDS[kind][1]
    alone = load(tokenizer, settings(rows, named, cache="none", processes=1), kind)
    monkeypatch.setattr(several, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(several, "ROWS_ALONE", 4)
    seen = list[int]()
    data = settings(rows, named, cache="none", processes=2)
    together = load(tokenizer, data, kind, observer=Observer(seen.append))
    assert [*map(plain, together.items)] == [*map(plain, alone.items)]
    assert together.bad_rows == alone.bad_rows and sum(seen) == 23
    assert fingerprint(together.items) == fingerprint(alone.items)
    stop = settings(rows, named, cache="none", processes=2, on_bad_row="stop")
    with pytest.raises(DataError, match=r"5 of 23 rows"):
        load(tokenizer, stop, kind)


def batch(*items: Row | Prompt) -> StoredRows[Any]:
    parts = [encode(items[:2]), encode(items[2:])] if len(items) > 2 else [encode(items)]
    return StoredRows(parts, fingerprint(list(items)))


def test_joined_rows_are_numbered_through() -> None:
    def prompt(index: int, *tokens: int, level: float | None = None) -> Prompt:
        return Prompt(index, np.array(tokens, dtype=np.int32), "", order_by=level)

    first = batch(prompt(0, 5), prompt(2, 6, 7), prompt(3, 8))
    second = batch(prompt(0, 5, level=2.5))
    joined: JoinedRows[Prompt] = JoinedRows([first, second], number_prompt)
    assert len(joined) == 4 and [p.index for p in joined] == [0, 1, 2, 3]
    assert joined[-1].tokens.tolist() == [5] and [p.index for p in joined[1:3]] == [1, 2]
    with pytest.raises(IndexError):
        joined[4]
    assert token_counts(joined).tolist() == [1, 2, 1, 1]
    keys = column_of(joined, "key")
    assert keys[0] == keys[3] and len(set(keys.tolist())) == 3
    levels = column_of(joined, "order_by")
    assert np.isnan(levels[:3]).all() and levels[3] == 2.5
    assert token_counts([prompt(0, 1, 2)]).tolist() == [2]


def test_a_pair_is_the_same_with_its_responses_swapped() -> None:
    def sample(*tokens: int) -> Sample:
        return Sample(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) == len(tokens) - 1)

    one, other = Pair(sample(1, 2), sample(1, 3)), Pair(sample(1, 3), sample(1, 2))
    stored = batch(one, other, one)
    keys = column_of(stored, "key")
    assert keys[0] == keys[1] and b"".join(hashed_parts([one])) != b"".join(hashed_parts([other]))
    assert sorted(np.concatenate([*learned_tokens(stored)]).tolist()) == [2, 2, 2, 3, 3, 3]
