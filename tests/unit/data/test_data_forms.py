"""The forms of users' data: JSON arrays, nested columns, ShareGPT's turns, and parts of text.

Also which columns of a row a prompt keeps.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data import json_rows
from plimsoll.data.dataset import load_prompts, load_samples
from plimsoll.data.fields import BadRow, RawRow
from plimsoll.data.first_rows import first_columns
from plimsoll.data.sources import read_rows
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError
from plimsoll.records import Prompt


def rows(path: Path, **columns: Any) -> list[RawRow | BadRow]:
    return list(read_rows(SourceConfig(path=str(path), **(columns or {"prompt": "q"}))))


def prompts(tokenizer: Tokenizer, source: SourceConfig, **settings: Any) -> Sequence[Prompt]:
    data = DataConfig(train=source, **settings)
    return load_prompts(data, source, make_template(tokenizer, "none", None)).items


def written(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


OBJECTS = st.dictionaries(st.text(max_size=3), st.floats(-9, 9) | st.text() | st.none(), max_size=3)


@given(st.lists(OBJECTS, max_size=5), st.sampled_from([None, 0, 2]), st.integers(1, 40))
def test_a_json_array_is_its_objects(
    tmp_path_factory: pytest.TempPathFactory,
    objects: list[dict[str, object]],
    indent: int | None,
    read_at_once: int,
) -> None:
    """The layout does not matter, nor where a chunk ends."""
    file = tmp_path_factory.getbasetemp() / "array.json"
    file.write_text("\n " + json.dumps(objects, indent=indent, ensure_ascii=False), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_READ_AT_ONCE", read_at_once)
        actual = rows(file)
    assert actual == [RawRow(str(file), i, values) for i, values in enumerate(objects, start=1)]


def test_items_of_an_array_that_are_no_objects_are_bad_rows_in_their_place(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf[{"q": 1}, 12, {"q": 1, "q": {"r": 2}}, {"q": 2}]\n')
    one, number, twice, two = rows(file)
    assert one == RawRow(str(file), 1, {"q": 1}) and two == RawRow(str(file), 4, {"q": 2})
    assert re.match(rf"{file}:2: .*\bint\b", str(number))
    assert re.match(rf"{file}:3: .*`q`.*twice", str(twice))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"q": 1},\n{"q": }]', r"a\.json:2: .*: Expecting value"),
        (b'[{"q": 1}\n\n{"q": 2}]', r"a\.json:3: .*: expecting ',', found '\{'"),
        (b'[{"q": 1},\n', r"a\.json:2: .*: Expecting value"),
        (b'[{"q": 1}]\n[]', r"a\.json:2: .*: something follows the array"),
        (b'[{"q": "\xff"}]', r"a\.json:1: .*: is not UTF-8: byte 0xff"),
    ],
)
def test_a_broken_array_is_refused_with_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path / "a.json")


def test_columns_within_columns(tmp_path: Path) -> None:
    nested = {"q": "hi", "reward_model": {"ground_truth": "4", "style": {"kind": "rule"}}}
    named_row = {"q": "hi", "reward_model.ground_truth": "5", "reward_model": {"ground_truth": "4"}}
    file = written(tmp_path / "a.jsonl", nested, named_row)
    named = {"prompt": "q", "reference": "reward_model.ground_truth"}
    actual = [row.values.get(named["reference"]) for row in rows(file, **named)]  # type: ignore[union-attr]
    assert actual == ["4", "5"]  # a column of that name comes first
    pq.write_table(pa.Table.from_pylist([{**nested, "more": 1}]), tmp_path / "a.parquet")
    [row] = rows(tmp_path / "a.parquet", prompt="q", reference="reward_model.style.kind")
    assert isinstance(row, RawRow) and [*row.values] == [
        "q",
        "reward_model",
        "reward_model.style.kind",
    ]
    assert row.values["reward_model.style.kind"] == "rule"


def test_a_parquet_column_with_a_dot_in_its_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"q": ["hi"], "a.b": ["2"]}), tmp_path / "a.parquet")
    [row] = rows(tmp_path / "a.parquet", prompt="q", reference="a.b")
    assert isinstance(row, RawRow) and row.values == {"q": "hi", "a.b": "2"}


def test_a_prompt_keeps_its_source_and_all_further_columns(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """This is verl's form. Missing values, and values that JSON cannot hold, are left out."""
    pq.write_table(
        pa.table(
            {
                "prompt": [[{"role": "user", "content": "1+1"}]],
                "data_source": ["sums"],
                "reward_model": [{"ground_truth": "2", "style": "rule"}],
                "extra_info": [{"index": 7, "split": None}],
                "picture": [b"\0"],
                "none": pa.array([None], pa.string()),
            }
        ),
        tmp_path / "a.parquet",
    )
    source = SourceConfig(
        path=str(tmp_path / "a.parquet"),
        messages="prompt",
        reference="reward_model.ground_truth",
        source="data_source",
    )
    [prompt] = prompts(tokenizer, source)
    assert (prompt.text, prompt.reference, prompt.source) == ("1+1", "2", "sums")
    assert prompt.columns == {
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 7, "split": None},
    }


def test_the_source_of_a_prompt_is_its_name_in_the_config(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.jsonl", {"q": "hi", "level": 3})
    entry: Any = {"path": str(file), "prompt": "q"}
    mixed = DataConfig.model_validate({"train": {"math": entry, "chat": entry}})
    template = make_template(tokenizer, "none", None)
    sources = mixed.train_sources().values()
    actual = [load_prompts(mixed, source, template).items[0] for source in sources]
    assert [(p.source, p.columns) for p in actual] == [
        ("math", {"level": 3}),
        ("chat", {"level": 3}),
    ]
    [alone] = prompts(tokenizer, SourceConfig.model_validate(entry))
    assert alone.source == ""


def test_turns_of_sharegpt_and_parts_of_text_are_messages(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    shared = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "1+1", "weight": None},
        {"from": "gpt", "value": "2"},
    ]
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]
    openai = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "2"},
    ]
    file = written(
        tmp_path / "a.jsonl", {"c": shared}, {"c": openai}, {"c": shared[:2] + openai[2:]}
    )
    source = SourceConfig(path=str(file), messages="c")
    made = make_template(tokenizer, None, None)
    items = load_samples(DataConfig(train=source), source, made).items
    texts = [tokenizer.decode(sample.tokens) for sample in items]
    head, tail = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n"
    answer = "<|im_start|>assistant\n2"
    assert texts[0] == f"{head}1+1{tail}{answer}{tail}" == texts[2]
    assert texts[1] == f"{head}1\n+1{tail}{answer}{tail}"  # as vLLM joins parts


def test_what_a_schema_or_the_first_rows_tell(tmp_path: Path) -> None:
    def known(path: Path) -> tuple[tuple[str, ...], bool] | None:
        actual = first_columns(SourceConfig(path=str(path), prompt="q"))
        return None if actual is None else (actual.names, actual.all)

    row = {"q": "hi", "a": {"b": "2"}}
    file = written(tmp_path / "a.jsonl", row)
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    datasets.Dataset.from_list([row]).save_to_disk(str(tmp_path / "saved"))
    for path in (file, tmp_path / "a.parquet", tmp_path / "saved"):
        actual = known(path)
        assert actual is not None and sorted(actual[0]) == ["a", "a.b", "q"] and actual[1]
    assert known(written(tmp_path / "long.jsonl", *[row] * 40)) == (("q", "a", "a.b"), False)
    assert known(tmp_path / "nowhere.jsonl") is None
    (tmp_path / "broken.jsonl").write_text("{")
    assert known(tmp_path / "broken.jsonl") is None


DATA = Path(os.environ.get("PLIMSOLL_DATA", Path(__file__).parents[4] / "shared" / "data"))


@pytest.mark.skipif(
    not (DATA / "math500").is_dir(),
    reason="MATH-500 is not here: set PLIMSOLL_DATA to the directory that holds math500/",
)
def test_math500(tokenizer: Tokenizer) -> None:
    """The directory alone names a JSON array of ShareGPT's turns."""
    with (DATA / "math500" / "math500.json").open(encoding="utf-8") as file:
        expected = [(row["prompt"][0]["value"], row["final_answer"]) for row in json.load(file)]
    source = SourceConfig(
        path=str(DATA / "math500"), messages="prompt", reference="final_answer", split="train"
    )
    actual = prompts(tokenizer, source, max_tokens=8192)
    assert [(p.text, p.reference) for p in actual] == expected and len(actual) == 500


@pytest.mark.skipif(
    not (DATA / "gsm8k").is_dir(),
    reason="GSM8K is not here: set PLIMSOLL_DATA to the directory that holds gsm8k/",
)
def test_gsm8k_prompts(tokenizer: Tokenizer) -> None:
    source = SourceConfig(
        path=str(DATA / "gsm8k"), prompt="question", reference="answer", split="test", limit=50
    )
    actual = prompts(tokenizer, source)
    assert len(actual) == 50 and all("#### " in (prompt.reference or "") for prompt in actual)
    wrong = SourceConfig(path=str(DATA / "gsm8k"), prompt="question", reference="anwser")
    columns = first_columns(wrong)
    assert columns is not None and columns.names == ("question", "answer")
