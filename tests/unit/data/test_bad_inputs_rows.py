"""Rows that no job can use: a refusal that names file, line and field, or a counted skip."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import percent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refused import DEEP, each, refusal
from transformers import PreTrainedTokenizerFast

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_pairs, load_prompts, load_samples
from plimsoll.data.loading import UNSEEN, Loaded, check_written
from plimsoll.data.pieces import Messages
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError

Load = Callable[..., Loaded[Any]]
ASKED: dict[str, object] = {"role": "user", "content": "hi"}
GOOD: dict[str, object] = {
    "q": "hi",
    "a": "yo",
    "b": "no",
    "m": [ASKED, {"role": "assistant", "content": "yo"}],
    "t": [],
}
JOBS: dict[str, tuple[Load, dict[str, str]]] = {
    "samples": (load_samples, {"prompt": "q", "response": "a"}),
    "messages": (load_samples, {"messages": "m"}),
    "pairs": (load_pairs, {"prompt": "q", "chosen": "a", "rejected": "b"}),
    "prompts": (load_prompts, {"prompt": "q", "reference": "a", "tools": "t"}),
}


def said(**turn: object) -> list[dict[str, object]]:
    return [ASKED, {"role": "assistant", "content": "x", **turn}]


BAD_TURNS: list[object] = [
    *(None, 1, True, 1e400, "", [], {}, [[]], [{}], [1], [None], "\ud800", 10**400),
    [{"role": "user"}],
    [{"role": "user", "content": "hi"}],
    [{"role": ["x"], "content": "y"}],
    [{"role": "nobody", "content": "y"}],
    [{"from": "gpt", "value": 3}],
    [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}],
    [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
    [ASKED, {"role": "function_call", "content": DEEP.decode()}],
    [ASKED, {"role": "function_call", "content": '{"name": 3}'}],
    [ASKED, {"role": "function_call", "content": "{"}],
    [ASKED, {"role": "function_call", "content": "[]"}],
    *(said(**{k: v}) for k, v in each("tool_calls", 5, [5], [{"function": 5}], {"a": 1}, "x")),
    *(said(**{key: value}) for key, value in each("function_call", [1], 5, "x", {})),
    *(said(**{key: value}) for key, value in each("weight", "a", 1e400, float("nan"), 2, -1)),
    said(weight=1, train=0),
]


def written(value: object, name: str, columns: dict[str, str], path: Path) -> Path:
    good = {column: GOOD[column] for column in columns.values()}
    path.write_text(f"{json.dumps(good)}\n{json.dumps({**good, name: value})}\n")
    return path


def load(job: str, path: Path, tokenizer: PreTrainedTokenizerFast, skip: bool) -> Loaded[Any]:
    read, columns = JOBS[job]
    source = SourceConfig(path=str(path), **columns)  # type: ignore[arg-type]
    data = DataConfig(train=source, on_bad_row="skip" if skip else "stop")
    return read(data, source, make_template(tokenizer, None, None), UNSEEN)


@pytest.mark.parametrize("value", BAD_TURNS, ids=range(len(BAD_TURNS)))
def test_a_bad_conversation(
    value: object, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = written(value, "m", JOBS["messages"][1], tmp_path / "r.jsonl")
    refusal(lambda: load("messages", path, tokenizer, skip=False), "r.jsonl:2", "m")
    assert len(load("messages", path, tokenizer, skip=True).bad_rows) == 1


NO_TEXT: list[object] = [None, 1, 1e400, {}, [[]], [1], [{"role": "user"}], {"a": {"a": {}}}]
TEXTS = [("samples", "q"), ("samples", "a"), ("pairs", "q"), ("pairs", "a"), ("pairs", "b")]


@pytest.mark.parametrize("value", NO_TEXT, ids=range(len(NO_TEXT)))
@pytest.mark.parametrize(("job", "name"), [*TEXTS, ("prompts", "q")])
def test_a_value_that_is_no_text(
    job: str, name: str, value: object, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = written(value, name, JOBS[job][1], tmp_path / "r.jsonl")
    refusal(lambda: load(job, path, tokenizer, skip=False), "r.jsonl:2", name)
    assert len(load(job, path, tokenizer, skip=True).bad_rows) == 1


BAD_TOOLS = (5, "x", "[5]", "[{}]", [5], [{"name": 5}], [{"function": 5}], {"a": 1}, DEEP.decode())


@pytest.mark.parametrize("value", BAD_TOOLS, ids=range(len(BAD_TOOLS)))
def test_bad_tools(value: object, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = written(value, "t", JOBS["prompts"][1], tmp_path / "r.jsonl")
    refusal(lambda: load("prompts", path, tokenizer, skip=False), "r.jsonl:2", "t")
    assert len(load("prompts", path, tokenizer, skip=True).bad_rows) == 1


CONTENTS = [
    *(b"", b"\n", b"null\n", b"[", b"{", b"\xff\xfe\x00", b"1e999", b"NaN", b"\x00" * 100, DEEP),
    *(b'{"m":' * 100_000, b'{"m": "a"}' * 3, b'{"m": ' + b"9" * 5000 + b"}", b'{"m": NaN}'),
    *(b'[{"m": "a"},', b'[{"m": "a"}]x', b"[1, 2]", b"[[]]", b'["\\ud800"]', b'{"m": 1, "m": 2}'),
    *(gzip.compress(b"{}")[:-3], b"PAR1" + bytes(100) + b"PAR1", b"q,a\n1,2\n"),
]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.jsonl.gz", "r.parquet", "r.csv"])
def test_a_file_without_a_row(
    content: bytes, name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for skip in (False, True):
        refusal(lambda skip=skip: load("messages", path, tokenizer, skip), name)  # type: ignore[misc]


def test_a_parquet_file_that_is_cut(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(pa.Table.from_pylist([GOOD] * 100), path)
    whole = path.read_bytes()
    for part in (whole[:-1], whole[: len(whole) // 2], whole[8:], whole[:100] + whole[200:]):
        path.write_bytes(part)
        refusal(lambda: load("messages", path, tokenizer, skip=True), "r.parquet")


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.just("assistant"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "weight"]), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=percent(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES)
def test_any_value_is_a_row_or_a_counted_skip(
    value: object, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = written(value, "m", JOBS["messages"][1], tmp_path / "r.jsonl")
    loaded = load("messages", path, tokenizer, skip=True)
    assert len(loaded.items) + len(loaded.bad_rows) == 2
    try:
        load("messages", path, tokenizer, skip=False)
    except ConfigError as error:
        assert "r.jsonl:2" in str(error) and loaded.bad_rows


@pytest.mark.parametrize(
    "reply", ["<think>" * 100_000, "</think>" * 100_000, "<think></think>" * 50_000]
)
def test_marks_of_reasoning_take_linear_time(reply: str) -> None:
    """An expression that looks for the last mark from each mark would take hours."""
    turns: Messages = [ASKED, {"role": "assistant", "content": reply}]
    assert check_written(turns, f"hi{reply}") is False
