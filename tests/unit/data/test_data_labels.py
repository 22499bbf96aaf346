"""Labelled responses: both forms of rows, each kind of bad row, prompts with other responses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_responses
from plimsoll.data.loading import Loaded
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError, DataError
from plimsoll.jobs.kto_loop import mismatch_responses
from plimsoll.records import LabelledResponse, Sample

USER = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "yo"}
MORE = {"role": "user", "content": "more"}
GOOD = {"q": "1?", "a": "yes", "label": True}


def load(
    tokenizer: Tokenizer,
    tmp_path: Path,
    *rows: object,
    template: str | None = "none",
    max_tokens: int = 200,
    **columns: str,
) -> Loaded[LabelledResponse]:
    """Return the labelled responses of these rows; bad ones are skipped."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = columns or {"prompt": "q", "response": "a", "label": "label"}
    source = SourceConfig.model_validate({"path": str(file), **columns})
    data = DataConfig(train=source, on_bad_row="skip", max_tokens=max_tokens)
    return load_responses(data, source, make_template(tokenizer, template, None))


def shown(tokenizer: Tokenizer, row: LabelledResponse) -> tuple[str, str, bool]:
    """Return (what comes before the learned tokens, what is learned, the label)."""
    tokens, loss_mask = row.sample.tokens, row.sample.loss_mask
    prompt = tokenizer.decode(tokens[: int(loss_mask.argmax())])
    return prompt, tokenizer.decode(tokens[loss_mask]), row.desirable


def test_rows_share_a_prompt_in_both_forms(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [GOOD, GOOD | {"a": "no", "label": 0}, GOOD | {"q": "2?"}]
    one, same, other = (row.prompt for row in load(tokenizer, tmp_path, *rows).items)
    assert one == same != other
    pairs = [{"q": "1?", "c": "yes", "r": "no"}, {"q": "2?", "c": "yes", "r": "no"}]
    loaded = load(tokenizer, tmp_path, *pairs, prompt="q", chosen="c", rejected="r")
    assert [row.prompt for row in loaded.items] == [one, one, other, other]


def test_each_label_that_can_be_meant(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """pandas makes 1.0 and 0.0 of true and false in a column with gaps."""
    rows = [GOOD | {"label": label} for label in (True, False, 1, 0, 1.0, 0.0)]
    loaded = load(tokenizer, tmp_path, *rows)
    assert [row.desirable for row in loaded.items] == [True, False] * 3
    assert shown(tokenizer, loaded.items[1]) == ("1?", "yes<|im_end|>", False)


def test_only_the_last_turn_of_messages_is_labelled(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"m": [USER, YO, MORE, YO], "label": 0}
    [loaded] = load(tokenizer, tmp_path, row, template=None, messages="m", label="label").items
    prompt, loss_mask, label = shown(tokenizer, loaded)
    assert prompt.count("yo<|im_end|>") == 1 and prompt.endswith("<|im_start|>assistant\n")
    assert (loss_mask, label) == ("yo<|im_end|>", False)


def test_the_chosen_response_of_a_pair_is_desirable(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"q": "1?", "good": "a", "bad": "b"}, {"q": "2?", "good": "c", "bad": "d"}]
    loaded = load(tokenizer, tmp_path, *rows, prompt="q", chosen="good", rejected="bad").items
    assert [shown(tokenizer, row) for row in loaded] == [
        ("1?", "a<|im_end|>", True),
        ("1?", "b<|im_end|>", False),
        ("2?", "c<|im_end|>", True),
        ("2?", "d<|im_end|>", False),
    ]


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"label": "true"}, "label", "true, false, 1 or 0.* text$"),
        ({"label": 2}, "label", r"true, false, 1 or 0.* number \(2\)"),
        ({"label": 0.5}, "label", r"true, false, 1 or 0.* number \(0\.5\)"),
        ({"label": None}, "label", "is missing"),
        ({"label": [True]}, "label", "true, false, 1 or 0.* list$"),
        ({"a": " "}, "a", "is empty"),
        ({"q": "1" * 190, "a": "2" * 20}, "a", r"211 tokens.*`data\.max_tokens: 200`"),
        ({"q": "1" * 200}, "a", r"token 201\b.*`data\.max_tokens: 200`"),
    ],
)
def test_bad_rows(
    tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any], field: str, problem: str
) -> None:
    loaded = load(tokenizer, tmp_path, GOOD, GOOD | change)
    [bad] = loaded.bad_rows
    assert (bad.file, bad.line, bad.field) == (str(tmp_path / "rows.jsonl"), 2, field)
    assert re.search(problem, bad.problem) and len(loaded.items) == 1


@pytest.mark.parametrize(
    ("messages", "field", "problem"),
    [
        ([USER, YO, MORE], "m[2].role", "is `user`, but the labelled response"),
        ([YO], "m", "has no turn before the response"),
        ([USER, {"role": "assistant", "content": 3}], "m[1].content", "must be text"),
    ],
)
def test_bad_messages(
    tokenizer: Tokenizer, tmp_path: Path, messages: object, field: str, problem: str
) -> None:
    rows = [{"m": m, "label": True} for m in ([USER, YO], messages)]
    [bad] = load(tokenizer, tmp_path, *rows, messages="m", label="label").bad_rows
    assert bad.field == field and bad.problem.startswith(problem)


def test_a_column_that_is_not_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`data\.train\.label: labl`.*Did you mean 'label'\?"):
        load(tokenizer, tmp_path, GOOD, prompt="q", response="a", label="labl")


def sample(prompt: str, response: str) -> Sample:
    text = np.array([ord(letter) for letter in prompt + response])
    return Sample(text, np.arange(len(text)) >= len(prompt))


def text(of: Sample) -> tuple[str, str]:
    """Return (what is not learned, what is)."""
    letters = np.array([chr(token) for token in of.tokens])
    return "".join(letters[~of.loss_mask]), "".join(letters[of.loss_mask])


def test_each_prompt_gets_the_next_response_to_another_one() -> None:
    """Worked example: the prompts a, b, b, a; after the last comes the first."""
    rows = [sample("a", "1"), sample("b", "2"), sample("b", "3"), sample("a", "4")]
    texts = [text(one) for one in mismatch_responses(rows, 10)]
    assert texts == [("a", "2"), ("b", "4"), ("b", "4"), ("a", "2")]


def test_the_same_prompt_everywhere_gets_the_next_response() -> None:
    texts = [text(one) for one in mismatch_responses([sample("a", x) for x in "123"], 10)]
    assert texts == [("a", "2"), ("a", "3"), ("a", "1")]


def test_what_is_too_long_is_cut_at_the_end_and_gaps_stay() -> None:
    """The response has two turns; the text between them is not learned."""
    loss_mask = np.array([False, True, False, True, True])
    two_turns = Sample(np.array([ord(letter) for letter in "pxyzz"]), loss_mask)
    first, second = mismatch_responses([sample("long", "1"), two_turns], 7)
    assert text(first) == ("longy", "xz") and text(second) == ("p", "1")


def test_one_row_has_no_other_response() -> None:
    with pytest.raises(DataError, match="only one row"):
        mismatch_responses([sample("a", "1")], 10)


@given(prompts=st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_partners_are_the_nearest_with_another_prompt(prompts: list[str]) -> None:
    rows = [sample(prompt, str(i)) for i, prompt in enumerate(prompts)]
    count = len(prompts)
    for i, one in enumerate(mismatch_responses(rows, 9)):
        prompt, response = text(one)
        others = [(i + k) % count for k in range(1, count)]
        expected = next((j for j in others if prompts[j] != prompts[i]), (i + 1) % count)
        assert (prompt, response) == (prompts[i], str(expected))
