"""Labelled steps: what is tokenized, where scores are read, each kind of bad row; and margins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_pairs, load_steps
from plimsoll.data.fields import RawRow, RowProblem
from plimsoll.data.loading import Loaded
from plimsoll.data.pairs import margin_of
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError
from plimsoll.records import LabelledSteps

ROW: dict[str, Any] = {"q": "2+3*4?", "s": ["3*4=12", "2+12=14"], "l": [True, 1]}
CHAT = "<|im_start|>user\n2+3*4?<|im_end|>\n<|im_start|>assistant\n"
STRIPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load(
    tokenizer: Tokenizer,
    tmp_path: Path,
    *rows: object,
    template: str | None = None,
    over_long: Literal["refuse", "truncate"] = "refuse",
    max_tokens: int = 200,
    separator: str = "\n",
    columns: Mapping[str, str | None] = MappingProxyType({}),
) -> Loaded[LabelledSteps]:
    """Return the rows; bad ones are skipped."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = SourceConfig(path=str(file), prompt="q", steps="s", labels="l")
    source = source.model_copy(update=dict(columns))
    data = DataConfig(
        train=source,
        on_bad_row="skip",
        over_long=over_long,
        max_tokens=max_tokens,
        step_separator=separator,
    )
    return load_steps(data, source, make_template(tokenizer, template, None))


def scored_texts(tokenizer: Tokenizer, row: LabelledSteps) -> list[str]:
    """Return the text up to each token that a score is read at."""
    places = row.sample.loss_mask.nonzero()[0]
    return [tokenizer.decode(row.sample.tokens[: place + 1]) for place in places]


def test_rows_share_a_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [ROW, ROW | {"s": ["3*4=13"], "l": [0]}, ROW | {"q": "2+3?"}]
    one, same, other = (row.prompt for row in load(tokenizer, tmp_path, *rows).items)
    assert one == same != other


def test_scores_are_read_at_the_last_token_of_each_step(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    [row] = load(tokenizer, tmp_path, ROW).items
    first = f"{CHAT}3*4=12"
    assert scored_texts(tokenizer, row) == [first, f"{first}\n2+12=14"]
    assert len(row.sample.tokens) == row.sample.loss_mask.nonzero()[0][-1] + 1  # nothing after it
    assert row.labels.tolist() == [1, 1]


def test_plain_text_with_a_beginning_and_another_separator(
    base_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    row = ROW | {"l": [0.25, False]}
    [loaded] = load(base_tokenizer, tmp_path, row, template="none", separator=" | ").items
    first = "<s>2+3*4?3*4=12"
    assert scored_texts(base_tokenizer, loaded) == [first, f"{first} | 2+12=14"]
    assert loaded.labels.tolist() == [0.25, 0]


def test_a_template_that_strips_turns_finds_its_steps(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = ROW | {"s": [" 3*4=12 ", "2+12=14\n"]}
    [loaded] = load(tokenizer, tmp_path, row, template=STRIPS).items
    assert scored_texts(tokenizer, loaded)[-1] == f"{CHAT}3*4=12\n2+12=14"


def test_a_prompt_of_several_turns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2+3*4?"}]
    columns = {"prompt": None, "messages": "m"}
    [loaded] = load(tokenizer, tmp_path, ROW | {"m": turns}, columns=columns).items
    assert scored_texts(tokenizer, loaded)[0] == f"{CHAT}3*4=12"


@given(st.lists(st.text("ab1 \n.", min_size=1).filter(str.strip), min_size=2, max_size=5))
def test_a_step_is_scored_alike_whether_or_not_more_follow(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """The first steps alone give the first tokens of the whole."""
    home = tmp_path_factory.mktemp("steps")
    rows = [{"q": "?", "s": steps[:n], "l": [1] * n} for n in (len(steps), len(steps) - 1)]
    for template in (None, "none"):
        whole, part = load(tokenizer, home, *rows, template=template).items
        length = len(part.sample.tokens)
        assert whole.sample.tokens[:length].tolist() == part.sample.tokens.tolist()
        assert whole.sample.loss_mask[:length].tolist() == part.sample.loss_mask.tolist()
        assert whole.sample.loss_mask.sum() == len(steps)


def test_long_responses_are_refused_or_lose_their_last_steps(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    short = ROW | {"s": ["1"], "l": [1]}
    [whole] = load(tokenizer, tmp_path, ROW).items
    most = len(whole.sample.tokens) - 1
    refused = load(tokenizer, tmp_path, ROW, short, max_tokens=most)
    assert [row.field for row in refused.bad_rows] == ["s"]
    cut, _ = load(tokenizer, tmp_path, ROW, short, max_tokens=most, over_long="truncate").items
    assert (len(cut.sample.tokens), cut.labels.tolist()) == (most, [1])
    assert scored_texts(tokenizer, cut) == [f"{CHAT}3*4=12"]


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"l": [True]}, "l", "length 1.*`s`.*length 2"),
        ({"l": [True, "yes"]}, "l[1]", "true or false, .*from 0 to 1"),
        ({"l": [None, True]}, "l[0]", "true or false"),
        ({"l": [1, -1]}, "l[1]", "is -1.*from 0 .*to 1"),
        ({"l": [1, 1.5]}, "l[1]", r"is 1\.5.*from 0 .*to 1"),
        ({"l": [1, float("nan")]}, "l[1]", "is nan"),
        ({"l": 1}, "l", "list of labels.* a number$"),
        ({"l": None}, "l", "is missing"),
        ({"s": ["3*4=12", " "]}, "s[1]", "is empty"),
        ({"s": ["3*4=12", 7]}, "s[1]", "text.* a number$"),
        ({"s": [], "l": []}, "s", "is empty"),
        ({"s": "3*4=12"}, "s", "list of texts.* text$"),
        ({"s": None}, "s", "is missing"),
        ({"q": " "}, "q", "is empty"),
    ],
)
def test_a_bad_row_is_named(
    tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any], field: str, problem: str
) -> None:
    loaded = load(tokenizer, tmp_path, ROW, ROW | change)
    [bad] = loaded.bad_rows
    assert len(loaded.items) == 1
    assert (bad.file, bad.line, bad.field) == (str(tmp_path / "rows.jsonl"), 2, field)
    assert re.search(problem, bad.problem)


def test_a_template_that_rewrites_the_steps_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    upper = STRIPS.replace("m.content | trim", "m.content | replace('=', ' is ')")
    loaded = load(tokenizer, tmp_path, ROW | {"s": ["a", "b"]}, ROW, template=upper)
    [bad] = loaded.bad_rows
    assert (bad.line, bad.field) == (2, "s") and "in another way" in bad.problem


@pytest.mark.parametrize("column", ["steps", "labels"])
def test_columns_that_are_not_there(tokenizer: Tokenizer, tmp_path: Path, column: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.train\.{column}: x"):
        load(tokenizer, tmp_path, ROW, columns={column: "x"})


def test_pairs_have_their_margins(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"p": "?", "c": "yes", "r": "no", "m": m} for m in (2, 0.5, -1, "1")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(file), prompt="p", chosen="c", rejected="r", margin="m")
    data = DataConfig(train=source, on_bad_row="skip")
    loaded = load_pairs(data, source, make_template(tokenizer, None, None))
    assert [pair.margin for pair in loaded.items] == [2.0, 0.5]
    assert [(bad.line, bad.field) for bad in loaded.bad_rows] == [(3, "m"), (4, "m")]
    bare = load_pairs(
        data, source.model_copy(update={"margin": None}), make_template(tokenizer, None, None)
    )
    assert [pair.margin for pair in bare.items] == [0.0] * 4


@pytest.mark.parametrize("value", [None, True, "1", -0.1, float("nan"), float("inf")])
def test_a_margin_that_is_none(value: object) -> None:
    with pytest.raises(RowProblem) as caught:
        margin_of(RawRow("x", 1, {"m": value}), "m")
    assert caught.value.field == "m"
