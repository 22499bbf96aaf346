"""Rows from every kind of source, and what cannot be read."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plimsoll.config.data import SourceConfig
from plimsoll.data.fields import BadRow, RawRow
from plimsoll.data.sources import read_rows
from plimsoll.errors import ConfigError


def rows(path: Path | str, split: str = "train", limit: int | None = None) -> list[RawRow | BadRow]:
    return list(read_rows(SourceConfig(path=str(path), split=split, prompt="q", limit=limit)))


def write_lines(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def test_json_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"q": "one"}\r\n\n  \n{"q": "two \\u2028 \xe2\x80\xa8"}\n{"q": 3}'
    )
    assert rows(file) == [
        RawRow(str(file), 1, {"q": "one"}),
        RawRow(str(file), 4, {"q": "two \u2028 \u2028"}),
        RawRow(str(file), 5, {"q": 3}),
    ]


def test_lines_that_cannot_be_read_are_bad_rows_in_their_place(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    deep = b"[" * 100_000
    file.write_bytes(b'{"q": 1}\n{"q": \n{"q": "\xff"}\n[1]\n' + deep + b'\n{"q": 2}\n')
    actual = rows(file)
    assert [row.line for row in actual] == [1, 2, 3, 4, 5, 6]
    assert [type(row) for row in actual] == [RawRow, BadRow, BadRow, BadRow, BadRow, RawRow]
    problems = [row.problem for row in actual if isinstance(row, BadRow)]
    facts = (r"JSON.* 8$", "UTF-8.*0xff.* 7$", "list.*object", "JSON")
    for problem, fact in zip(problems, facts, strict=True):
        assert re.search(fact, problem)


def test_a_key_that_is_there_twice_is_no_choice_to_make(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "one", "q": "two"}\n{"q": "three", "r": {"s": 1, "s": 1}}\n')
    assert [row.problem for row in rows(file) if isinstance(row, BadRow)] == [
        "is not JSON: the key `q` is there twice",
        "is not JSON: the key `s` is there twice",
    ]


def test_packed_json_lines_are_those_within(tmp_path: Path) -> None:
    file = tmp_path / "a.JSONL.gz"
    file.write_bytes(gzip.compress(b'{"q": "one"}\n\n{"q":\n{"q": 3}'))
    one, broken, three = rows(file)
    assert one == RawRow(str(file), 1, {"q": "one"}) and three == RawRow(str(file), 4, {"q": 3})
    assert isinstance(broken, BadRow) and broken.line == 3
    assert rows(tmp_path) == rows(file)


@pytest.mark.parametrize("harm", [lambda raw: raw[:-5], lambda raw: b"{}" + raw, lambda raw: b"{}"])
def test_packed_lines_that_cannot_be_unpacked(
    tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(harm(gzip.compress(b'{"q": "one"}\n' * 100)))
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz.*unpacked"):
        rows(file)


def test_parquet_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    turns = [{"role": "user", "content": "hi"}]
    pq.write_table(pa.table({"q": ["one", None], "messages": [turns, []], "n": [1, 2]}), file)
    named = SourceConfig(path=str(file), prompt="q", messages="messages")
    assert list(read_rows(named)) == [
        RawRow(str(file), 1, {"q": "one", "messages": turns}),
        RawRow(str(file), 2, {"q": None, "messages": []}),
    ]
    missing = SourceConfig(path=str(file), prompt="question")
    assert [[*row.values] for row in read_rows(missing) if isinstance(row, RawRow)] == [
        ["q", "messages", "n"],
        ["q", "messages", "n"],
    ]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()])
def test_parquet_text_of_any_type(tmp_path: Path, kind: pa.DataType) -> None:
    file = tmp_path / "a.parquet"
    words = pa.array(["one", "two", "one"], kind)
    coded = pa.array(["x", "y", "x"]).dictionary_encode()
    pq.write_table(pa.table({"q": words, "a": coded}), file)
    named = SourceConfig(path=str(file), prompt="q", response="a")
    actual = [row.values for row in read_rows(named) if isinstance(row, RawRow)]
    assert actual == [{"q": "one", "a": "x"}, {"q": "two", "a": "y"}, {"q": "one", "a": "x"}]


def test_a_time_that_python_has_not_is_a_bad_row_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    late = pa.array([0, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"q": ["one", "two"], "late": late}), file)
    assert [row.line for row in rows(file) if isinstance(row, RawRow)] == [1, 2]
    _, bad = read_rows(SourceConfig(path=str(file), prompt="q", reference="late"))
    assert isinstance(bad, BadRow) and (bad.line, bad.field) == (2, "late")
    assert bad.problem.startswith("cannot be read: ")


def test_parquet_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    binary = pa.array([b"one", b"\xfe", b"two"], pa.binary())
    text = pa.StringArray.from_buffers(3, binary.buffers()[1], binary.buffers()[2])
    pq.write_table(pa.table({"q": text}), file)
    assert rows(file) == [
        RawRow(str(file), 1, {"q": "one"}),
        BadRow(str(file), 2, "q", "is not UTF-8: byte 0xfe at offset 0"),
        RawRow(str(file), 3, {"q": "two"}),
    ]


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_text("not at all")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as Parquet"):
        rows(file)


def test_parquet_whose_pages_are_broken_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"q": [f"row {i}" for i in range(100)]}), file)
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\xff" * 40 + content[44:])
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as Parquet"):
        rows(file)


def test_a_directory_is_its_files_in_order(tmp_path: Path) -> None:
    second = write_lines(tmp_path / "b.jsonl", {"q": 3})
    first = write_lines(tmp_path / "a.jsonl", {"q": 1}, {"q": 2})
    (tmp_path / "README.md").write_text("no rows")
    (tmp_path / "._a.jsonl").write_bytes(b"\0\5")  # as macOS leaves beside a file
    assert [(row.file, row.line) for row in rows(tmp_path)] == [
        (str(first), 1),
        (str(first), 2),
        (str(second), 1),
    ]


def test_files_named_after_splits_are_not_mixed(tmp_path: Path) -> None:
    write_lines(tmp_path / "test.jsonl", {"q": "secret"})
    write_lines(tmp_path / "train-00000-of-00001.jsonl", {"q": "known"})
    actual = {split: rows(tmp_path, split) for split in ("train", "test")}
    assert [row.values for row in actual["train"] if isinstance(row, RawRow)] == [{"q": "known"}]
    assert [row.values for row in actual["test"] if isinstance(row, RawRow)] == [{"q": "secret"}]
    with pytest.raises(ConfigError, match=r"split `dev`.* test\.jsonl"):
        rows(tmp_path, "dev")


def test_a_split_that_files_are_not_named_after_is_not_taken_for_all_of_them(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "one.jsonl", {"q": 1})
    assert len(rows(tmp_path)) == 1
    with pytest.raises(ConfigError, match=r"belongs to the split `test`"):
        rows(tmp_path, "test")


def test_the_limit_counts_bad_rows_too(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": 1}\nbroken\n{"q": 2}\n')
    assert [type(row) for row in rows(file, limit=2)] == [RawRow, BadRow]


def test_a_saved_data_set(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"q": ["one", "two", "three"]})
    made.select([2, 0]).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(ConfigError, match="without the split `test`"):
        rows(tmp_path / "one", "test")
    assert rows(tmp_path / "one") == [
        RawRow(str(tmp_path / "one"), 1, {"q": "three"}),
        RawRow(str(tmp_path / "one"), 2, {"q": "one"}),
    ]


def test_a_saved_data_set_with_splits(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"q": ["one"]})
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "all"))
    assert rows(tmp_path / "all", "test") == [RawRow(str(tmp_path / "all"), 1, {"q": "one"})]
    with pytest.raises(ConfigError, match=r"split `tset`.* train, test.*'test'\?"):
        rows(tmp_path / "all", "tset")


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "shards" / "b.jsonl").mkdir(parents=True)
    write_lines(tmp_path / "shards" / "a.jsonl", {"q": 1})
    with pytest.raises(ConfigError, match=r"b\.jsonl .*Is a directory"):
        rows(tmp_path / "shards")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigError, match=r"link\.jsonl .*link to .*gone\.jsonl"):
        rows(tmp_path / "link.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match=r"pipe\.jsonl .*neither a file"):
        rows(tmp_path / "pipe.jsonl")
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "a.parquet")
    with pytest.raises(ConfigError, match=r"pipes/a\.parquet .*neither a file"):
        rows(tmp_path / "pipes")


def test_a_missing_path_names_its_neighbours(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", {"q": 1})
    with pytest.raises(ConfigError, match=r"`trian\.jsonl` .*'train\.jsonl'\?"):
        rows(tmp_path / "trian.jsonl")
    (tmp_path / "gsm8k").mkdir()
    with pytest.raises(ConfigError, match=r"`gms8k` .*'gsm8k'\?"):
        rows(tmp_path / "gms8k" / "train.jsonl")


def test_a_missing_file_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"There is no trian\.jsonl"):
        rows("trian.jsonl")


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q\n1\n")
    with pytest.raises(ConfigError, match=r"a\.csv .*\.csv\b.* format"):
        rows(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="holds no data files"):
        rows(tmp_path)


def test_a_hub_that_does_not_answer_is_a_readable_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client is in offline mode, so that the test never waits for a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"`plimsoll-tests/nowhere` .*Hub"):
        rows("plimsoll-tests/nowhere")


def test_a_hubs_data_set_is_asked_for_by_name_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no hub in tests; the test checks what its client is asked for."""
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def answer(*arguments: object, **named: object) -> datasets.Dataset:
        asked.append((arguments, named))
        return datasets.Dataset.from_dict({"q": ["one"]})

    signature = inspect.signature(datasets.load_dataset)
    monkeypatch.setattr(datasets, "load_dataset", answer)
    [row] = read_rows(SourceConfig(path="openai/gsm8k", name="main", split="test", prompt="q"))
    assert row == RawRow("openai/gsm8k", 1, {"q": "one"})
    [(arguments, named)] = asked
    bound = signature.bind(*arguments, **named).arguments
    assert bound == {"path": "openai/gsm8k", "name": "main", "split": "test"}


def test_a_file_has_no_configurations(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"q": "one"})
    with pytest.raises(ConfigError, match="`name: main` chooses a configuration"):
        list(read_rows(SourceConfig(path=str(file), name="main", prompt="q")))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json"])
def test_a_row_of_gigabytes_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    if name == "a.json":
        with (tmp_path / name).open("wb") as file:  # most of the file is a hole
            file.write(b'[{"q": "')
            file.truncate(2**33)
    else:
        (tmp_path / name).write_bytes(gzip.compress(b'{"q": 1}\n' + bytes(2**26 + 1), 1))
    with pytest.raises(ConfigError, match=rf"{name}:\d: .*over 67,108,864"):
        rows(tmp_path / name)


@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_a_deep_row_is_bad_in_its_place(form: str, tmp_path: Path) -> None:
    file, deep = tmp_path / "a.json", '{"q": ' + "[" * 900 + "]" * 900 + "}"
    file.write_text(form.format(deep))
    assert rows(file) == [BadRow(str(file), 1, "", "is nested more than 100 deep")]


def test_a_number_of_thousands_of_digits_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[{"q": ' + "1" * 5000 + "}]")
    with pytest.raises(ConfigError, match=r"a\.json:1: .*digits"):
        rows(file)


def test_a_text_beyond_its_buffer_is_a_bad_row(tmp_path: Path) -> None:
    """Arrow does not check the offsets of a saved data set's texts when it reads them."""
    datasets.Dataset.from_dict({"q": ["one", "two", "three"]}).save_to_disk(str(tmp_path / "saved"))
    [file] = (tmp_path / "saved").glob("*.arrow")
    content = file.read_bytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 3, 6, 11))
    wrong = b"".join(n.to_bytes(4, "little") for n in (0, 3, 6, 2**30))
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, wrong))
    first, second, bad = rows(tmp_path / "saved")
    assert isinstance(first, RawRow) and isinstance(second, RawRow)
    assert isinstance(bad, BadRow) and (bad.line, bad.field) == (3, "q")


def test_a_changed_parquet_file_is_a_clear_error(tmp_path: Path) -> None:
    file, draw = tmp_path / "a.parquet", random.Random(1)
    texts = [f"text {i} é" for i in range(200)]
    messages = [[{"role": "user", "content": text}] for text in texts]
    pq.write_table(pa.table({"q": texts, "messages": messages}), file, compression="none")
    content = file.read_bytes()
    refused = 0
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 4, 30))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        file.write_bytes(changed)
        try:
            list(read_rows(SourceConfig(path=str(file), messages="messages"), whole=True))
        except ConfigError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > 50
