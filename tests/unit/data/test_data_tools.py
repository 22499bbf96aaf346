"""The tools that conversations may call: read from a column, described by the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data import several
from plimsoll.data.dataset import load_pairs, load_prompts, load_samples
from plimsoll.data.template import Template, make_template
from plimsoll.errors import ConfigError

WRITES = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "add(2, 2)"}]
ADD = {"name": "add", "parameters": {"type": "object", "default": None}}
CALLED = {"type": "function", "function": {"name": "sub"}}


def rows_of(tmp_path: Path, *rows: Mapping[str, object], **columns: str) -> DataConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = SourceConfig(path=str(file), tools="tools", **columns)  # type: ignore[arg-type]
    return DataConfig(train=train, on_bad_row="skip", max_tokens=1000)


def source(data: DataConfig) -> SourceConfig:
    """Return the only source."""
    [actual] = data.train_sources().values()
    return actual


def texts(data: DataConfig, template: Template) -> list[tuple[str, str]]:
    """Return the whole text of each SFT sample, and what is learned of it."""
    read = template.tokenizer.decode
    samples = load_samples(data, source(data), template).items
    return [(str(read(s.tokens)), str(read(s.tokens[s.loss_mask]))) for s in samples]


def test_the_template_describes_each_rows_own_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = make_template(tokenizer, WRITES, None)
    given: list[Any] = [[CALLED], json.dumps([ADD]), None, []]
    rows = [{"messages": TURNS, "tools": tools} for tools in given]
    data = rows_of(tmp_path, *rows, {"messages": TURNS}, messages="messages")
    plain = "user: 2+2?<|im_end|>\nassistant: add(2, 2)<|im_end|>\n"
    loss_mask = "add(2, 2)<|im_end|>"
    assert texts(data, template) == [
        (f"tools: {json.dumps([CALLED])}\n{plain}", loss_mask),
        (f"tools: {json.dumps([ADD])}\n{plain}", loss_mask),
        *[(plain, loss_mask)] * 3,
    ]


def test_columnar_data_fill_tools_with_nulls(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Every tool has the keys of all tools."""
    file = tmp_path / "rows.parquet"
    tools = [[{"name": "add", "parameters": {"a": "int"}}], [{"name": "neg", "strict": True}]]
    Dataset.from_list([{"messages": TURNS, "tools": each} for each in tools]).to_parquet(file)
    data = DataConfig(train=SourceConfig(path=str(file), messages="messages", tools="tools"))
    actual = texts(data, make_template(tokenizer, WRITES, None))
    assert [text.partition("\n")[0] for text, _ in actual] == [
        f"tools: {json.dumps(each)}" for each in tools
    ]


def test_pairs_and_prompts_have_tools_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = make_template(tokenizer, WRITES, None)
    row = {"q": "2+2?", "yes": "add(2, 2)", "no": "5", "tools": [ADD]}
    data = rows_of(tmp_path, row, prompt="q", chosen="yes", rejected="no")
    [pair] = load_pairs(data, source(data), template).items
    data = rows_of(tmp_path, row, prompt="q")
    [prompt] = load_prompts(data, source(data), template).items
    for tokens in (pair.chosen.tokens, pair.rejected.tokens, prompt.tokens):
        assert str(tokenizer.decode(tokens)).startswith('tools: [{"name": "add"')


@pytest.mark.parametrize(
    "tools, field, problem",
    [
        ({"name": "add"}, "tools", "list of tools.* an object$"),
        ([ADD, "sub"], "tools[1]", "object with a `name`"),
        ([{"function": {}}], "tools[0]", "object with a `name`"),
        ("[{", "tools", "text.*not valid JSON"),
        ('"add"', "tools", "list of tools.* text$"),
    ],
)
def test_a_value_that_is_no_list_of_tools_is_bad(
    tokenizer: Tokenizer, tmp_path: Path, tools: object, field: str, problem: str
) -> None:
    good = {"messages": TURNS}
    data = rows_of(tmp_path, {"messages": TURNS, "tools": tools}, good, messages="messages")
    loaded = load_samples(data, source(data), make_template(tokenizer, WRITES, None))
    [bad] = loaded.bad_rows
    assert (bad.line, bad.field) == (1, field) and re.search(problem, bad.problem)
    assert len(loaded.items) == 1


@pytest.mark.parametrize(
    "template, field, problem",
    [
        (None, "messages", "tool 'add'.*chat template leaves"),
        ("none", "tools", "tools.*plain text leaves"),
    ],
)
def test_a_row_whose_tools_are_left_out_is_bad(
    tokenizer: Tokenizer, tmp_path: Path, template: str | None, field: str, problem: str
) -> None:
    rows = ({"messages": TURNS, "tools": [ADD]}, {"messages": TURNS})
    data = rows_of(tmp_path, *rows, messages="messages")
    [bad] = load_samples(data, source(data), make_template(tokenizer, template, None)).bad_rows
    assert bad.field == field and re.search(problem, bad.problem)


def test_only_a_late_row_may_have_tools(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several, "ROWS_AT_ONCE", 1)
    template = make_template(tokenizer, WRITES, None)
    rows = ({"messages": TURNS}, {"messages": TURNS, "tools": [ADD]})
    data = rows_of(tmp_path, *rows, messages="messages").model_copy(update={"on_bad_row": "stop"})
    assert len(texts(data, template)) == 2
    data = rows_of(tmp_path, {"messages": TURNS}, messages="messages")
    with pytest.raises(ConfigError, match=r"column `tools`.*`messages`"):
        load_samples(data, source(data), template)
