"""Rows of columnar data equal those of JSON: Arrow's padding is dropped, written nulls stay."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_prompts, load_responses, load_samples
from plimsoll.data.template import make_template

WRITES = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def call(name: str, **arguments: object) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def tool(name: str, **kinds: str) -> dict[str, object]:
    properties = {argument: {"type": kind} for argument, kind in kinds.items()}
    return {"name": name, "parameters": {"type": "object", "properties": properties}}


def row(turns: list[dict[str, object]], tools: object, **more: object) -> dict[str, object]:
    asked, answer = turns[0], {"role": "assistant", "content": "So it is."}
    return {"messages": [*turns, answer], "asked": [asked], "tools": tools, **more}


ROWS = [
    row(
        [{"role": "user", "content": "Sunny?"}, call("weather", town="Rome")],
        [tool("weather", town="string")],
        label=True,
        answer=72,
        names={"target": ["Ann", "Al"]},
    ),
    row(
        [{"role": "user", "content": "2+3?"}, call("add", a=2, b=3)],
        [tool("add", a="number", b="number"), tool("now")],
        label=False,
        answer=5,
        names={"target": ["Bo"]},
    ),
]


def json_lines(path: Path) -> Path:
    (path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    return path / "rows.jsonl"


def packed(path: Path) -> Path:
    with gzip.open(path / "rows.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(one) + "\n" for one in ROWS))
    return path / "rows.jsonl.gz"


def parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path / "rows.parquet")
    return path / "rows.parquet"


def saved(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path / "saved"))
    return path / "saved"


def saved_as_json(path: Path) -> Path:
    """Save rows with objects of different keys as text of the type arrow.json."""
    mixed = datasets.Dataset.from_list(ROWS, on_mixed_types="use_json")
    assert "Json" in str(mixed.features)
    mixed.save_to_disk(str(path / "json"))
    return path / "json"


def parquet_as_json(path: Path) -> Path:
    mixed = datasets.Dataset.from_list(ROWS, on_mixed_types="use_json")
    mixed.to_parquet(str(path / "json.parquet"))
    return path / "json.parquet"


def read(tokenizer: Tokenizer, path: Path) -> list[object]:
    """Return tokens, what is learned, labels, references and columns of all rows."""
    template = make_template(tokenizer, WRITES, None)

    def of(load: Callable[..., Any], **columns: str) -> Any:
        source = SourceConfig(path=str(path), tools="tools", **columns)  # type: ignore[arg-type]
        return load(DataConfig(train=source, max_tokens=2000), source, template).items

    samples = of(load_samples, messages="messages")
    labelled = of(load_responses, messages="messages", label="label")
    numbers = of(load_prompts, messages="asked", reference="answer")
    objects = of(load_prompts, messages="asked", reference="names")
    within = of(load_prompts, messages="asked", reference="names.target")
    prompts = [*numbers, *objects, *within]
    return [
        [(s.tokens.tolist(), s.loss_mask.tolist()) for s in samples],
        [(one.sample.tokens.tolist(), one.desirable) for one in labelled],
        [(p.tokens.tolist(), p.reference, p.given_reference) for p in prompts],
    ]


@pytest.mark.parametrize("write", [packed, parquet, saved, saved_as_json, parquet_as_json])
def test_the_same_rows_give_the_same_in_every_form(
    tokenizer: Tokenizer, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    expected: Any = read(tokenizer, json_lines(tmp_path))
    assert read(tokenizer, write(tmp_path)) == expected
    text = tokenizer.decode(expected[0][0][0])
    assert '{"name": "weather", "arguments": {"town": "Rome"}}' in text
    assert [one[1] for one in expected[1]] == [True, False]
    assert [one[1:] for one in expected[2]] == [
        ("72", 72),
        ("5", 5),
        ('{"target": ["Ann", "Al"]}', {"target": ["Ann", "Al"]}),
        ('{"target": ["Bo"]}', {"target": ["Bo"]}),
        ('["Ann", "Al"]', ["Ann", "Al"]),
        ('["Bo"]', ["Bo"]),
    ]


def test_nulls_that_json_has_stay(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In JSON lines, and in Arrow's text of JSON, in arguments and in tools."""
    kind = {"type": ["number", "null"], "default": None, "enum": [1, None]}
    schema = {"name": "add", "parameters": {"properties": {"b": kind}}}
    whole = row([{"role": "user", "content": "Add."}, call("add", a=1, b=None)], [schema])
    del whole["asked"]
    (tmp_path / "a.jsonl").write_text(json.dumps(whole) + "\n")
    features = datasets.Features(
        messages=datasets.List(datasets.Json()), tools=datasets.List(datasets.Json())
    )
    datasets.Dataset.from_list([whole], features=features).save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "a.jsonl", tmp_path / "saved"):
        source = SourceConfig(path=str(path), messages="messages", tools="tools")
        data = DataConfig(train=source)
        [sample] = load_samples(data, source, make_template(tokenizer, WRITES, None)).items
        text = tokenizer.decode(sample.tokens)
        assert json.dumps([schema]) in text and '"arguments": {"a": 1, "b": null}' in text


def test_padding_goes_at_any_depth_and_in_columns_within_columns(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A null in a list is an item, and stays. Further columns keep their nulls, too."""
    turns = [{"role": "user", "content": "hi"}, call("f", at={"x": [1, None]})]
    other = [{"role": "user", "content": "hi"}, call("g", at={"y": 2})]
    rows = [{"chat": {"turns": one}, "info": {"n": n}} for one, n in ((turns, 1), (other, None))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = SourceConfig(path=str(tmp_path / "a.parquet"), messages="chat.turns")
    data, template = DataConfig(train=source), make_template(tokenizer, WRITES, None)
    texts = [tokenizer.decode(s.tokens) for s in load_samples(data, source, template).items]
    assert '"arguments": {"at": {"x": [1, null]}}' in texts[0]
    assert '"arguments": {"at": {"y": 2}}' in texts[1]
    asked = [{"chat": {"turns": one["chat"]["turns"][:1]}, "info": one["info"]} for one in rows]  # type: ignore[index]
    pq.write_table(pa.Table.from_pylist(asked), tmp_path / "a.parquet")
    prompts = load_prompts(data, source, template).items
    assert [prompt.columns["info"] for prompt in prompts] == [{"n": 1}, {"n": None}]


def test_text_that_is_no_json_is_a_bad_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = pa.array(['{"role": "user", "content": "hi"}', "{"], pa.json_())
    table = pa.table({"turns": pa.ListArray.from_arrays([0, 1, 2], kept), "n": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = SourceConfig(path=str(tmp_path / "a.parquet"), messages="turns")
    data = DataConfig(train=source, on_bad_row="skip")
    loaded = load_prompts(data, source, make_template(tokenizer, WRITES, None))
    [bad] = loaded.bad_rows
    assert (bad.line, bad.field) == (2, "turns") and bad.problem.startswith("cannot be read: Expe")
    assert len(loaded.items) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(72.0, "72"), (-0.0, "0"), (0.5, "0.5"), (2.0**60, "1.152921504606847e+18"), (True, "true")],
)
def test_a_whole_number_has_no_fraction(
    tokenizer: Tokenizer, tmp_path: Path, value: object, text: str
) -> None:
    """pandas makes 72.0 of 72 if some rows have none. Functions get what the row has."""
    pq.write_table(pa.table({"q": ["6*12?"], "r": [value]}), tmp_path / "a.parquet")
    source = SourceConfig(path=str(tmp_path / "a.parquet"), prompt="q", reference="r")
    template = make_template(tokenizer, "none", None)
    [prompt] = load_prompts(DataConfig(train=source), source, template).items
    assert (prompt.reference, prompt.given_reference) == (text, value)
