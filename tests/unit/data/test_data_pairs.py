"""Preference pairs: the three forms of rows, each kind of bad row, and HH-RLHF."""

from __future__ import annotations

import json
import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_pairs
from plimsoll.data.loading import Loaded
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError
from plimsoll.records import Pair

USER = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "yo"}
GO = {"role": "assistant", "content": "go away"}
MORE = {"role": "user", "content": "more"}
DIALOGUE = "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: more\n\nAssistant:"
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def load(
    tokenizer: Tokenizer,
    tmp_path: Path,
    *rows: object,
    template: str | None = None,
    system: str | None = None,
    over_long: Literal["refuse", "truncate"] = "refuse",
    max_tokens: int = 200,
    prompt: str | None = None,
    rejected: str | None = "bad",
) -> Loaded[Pair]:
    """Return the pairs of these rows; bad ones are skipped."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(
        train=SourceConfig(path=str(file), prompt=prompt, chosen="good", rejected=rejected),
        on_bad_row="skip",
        over_long=over_long,
        max_tokens=max_tokens,
    )
    [source] = data.train_sources().values()
    return load_pairs(data, source, make_template(tokenizer, template, system))


def text(tokenizer: Tokenizer, pair: Pair) -> tuple[str, str, str]:
    """Return (what comes before the learned tokens, chosen, rejected). The first must be shared."""
    prompts = {
        tokenizer.decode(s.tokens[: int(s.loss_mask.argmax())])
        for s in (pair.chosen, pair.rejected)
    }
    [prompt] = prompts
    loss_mask = [tokenizer.decode(s.tokens[s.loss_mask]) for s in (pair.chosen, pair.rejected)]
    return prompt, loss_mask[0], loss_mask[1]


def bad(tokenizer: Tokenizer, tmp_path: Path, row: object, **options: Any) -> tuple[str, str]:
    """Return field and problem of the row, which must be the only bad one beside a good one."""
    good = {"q": "1?", "good": [USER, YO], "bad": [USER, GO]}
    if "prompt" in options:
        good = {"q": "1?", "good": "yes", "bad": "no"}
    loaded = load(tokenizer, tmp_path, good, row, **options)
    [bad_row] = loaded.bad_rows
    assert len(loaded.items) == 1
    assert (bad_row.file, bad_row.line) == (str(tmp_path / "rows.jsonl"), 2)
    return bad_row.field, bad_row.problem


def test_a_prompt_and_two_responses(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"q": "hi", "good": "yo", "bad": "go away"}
    [pair] = load(tokenizer, tmp_path, row, prompt="q").items
    assert text(tokenizer, pair) == (CHAT, "yo<|im_end|>", "go away<|im_end|>")
    [pair] = load(tokenizer, tmp_path, row, prompt="q", template="none").items
    assert text(tokenizer, pair) == ("hi", "yo<|im_end|>", "go away<|im_end|>")


def test_the_turns_that_both_begin_with_are_the_prompt(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The prompt's assistant turn is not learned; those of the answers are."""
    row = {"good": [USER, YO, MORE, YO], "bad": [USER, YO, MORE, GO, MORE, YO]}
    [pair] = load(tokenizer, tmp_path, row).items
    prompt = CHAT + "yo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert text(tokenizer, pair) == (prompt, "yo<|im_end|>", "go away<|im_end|>yo<|im_end|>")
    [pair] = load(tokenizer, tmp_path, row, template="none").items
    assert text(tokenizer, pair) == ("hiyomore", "yo<|im_end|>", "go awayyo<|im_end|>")


def test_a_system_message_comes_before_both(tokenizer: Tokenizer, tmp_path: Path) -> None:
    [pair] = load(tokenizer, tmp_path, {"good": [USER, YO], "bad": [USER, GO]}, system="S").items
    prompt = f"<|im_start|>system\nS<|im_end|>\n{CHAT}"
    assert text(tokenizer, pair) == (prompt, "yo<|im_end|>", "go away<|im_end|>")


def test_marks_of_the_template_decide_what_is_learned(tokenizer: Tokenizer, tmp_path: Path) -> None:
    jinja = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}U:{{ m.content }}{% endif %}|{% endfor %}"
    )
    row = {"good": [USER, YO, MORE, YO], "bad": [USER, YO, MORE, GO]}
    [pair] = load(tokenizer, tmp_path, row, template=jinja).items
    assert text(tokenizer, pair) == ("U:hi|A:yo|U:more|A:", "yo", "go away")


def test_dialogues_share_the_text_up_to_the_last_assistant(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    row = {"good": DIALOGUE + " yo yo", "bad": DIALOGUE + " yo no"}
    [pair] = load(tokenizer, tmp_path, row, template="none").items
    assert text(tokenizer, pair) == (DIALOGUE, " yo yo<|im_end|>", " yo no<|im_end|>")
    [pair] = load(tokenizer, tmp_path, row).items
    prompt = CHAT + "yo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert text(tokenizer, pair) == (prompt, "yo yo<|im_end|>", "yo no<|im_end|>")


def test_a_plain_begin_token_is_kept(base_tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"good": DIALOGUE + " a", "bad": DIALOGUE + " b"}
    [pair] = load(base_tokenizer, tmp_path, row, template="none").items
    assert text(base_tokenizer, pair) == ("<s>" + DIALOGUE, " a</s>", " b</s>")


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ({"q": "1?", "good": "a", "bad": "a"}, "bad", "equals `good`"),
        ({"q": "1?", "good": "", "bad": "a"}, "good", "is empty"),
        ({"q": "1?", "good": "a", "bad": " \n"}, "bad", "is empty"),
        ({"q": "1?", "good": "a", "bad": ["b"]}, "bad[0]", "object with role and content.* text$"),
        ({"q": "1?", "good": "a"}, "bad", "is missing"),
        ({"good": "a", "bad": "b"}, "q", "is missing"),
        (
            {"q": "1?", "good": [USER, YO], "bad": [USER, GO]},
            "good[0].role",
            "is `user`.*assistant's turn.*column of prompts",
        ),
    ],
)
def test_bad_columns(
    tokenizer: Tokenizer, tmp_path: Path, row: object, field: str, problem: str
) -> None:
    found_field, found_problem = bad(tokenizer, tmp_path, row, prompt="q")
    assert found_field == field and re.search(problem, found_problem)


@pytest.mark.parametrize(
    ("good", "other", "field", "problem"),
    [
        ([USER, YO], [USER, YO], "bad", "equals `good`"),
        ([USER, YO], [MORE, YO], "bad", "begins with another turn than `good`"),
        ([USER, YO], [USER], "bad", "ends where the other response begins"),
        ([USER, YO], [USER, YO, MORE, GO], "good", "ends where the other response begins"),
        ([USER, YO, USER, YO], [USER, YO, MORE, YO], "good[2].role", "is `user`, but the first"),
        ([USER, YO], [USER, {"role": "assistant", "content": ""}], "bad[1].content", "is empty"),
        ([USER, YO], "go away", "bad", "must be a list of messages, but is text"),
        ([USER, YO], [USER, 3], "bad[1]", "must be an object with role and content"),
        ([YO, USER, YO], [YO, USER, GO], "good", "begins with the assistant's turn"),
    ],
)
def test_bad_messages(
    tokenizer: Tokenizer, tmp_path: Path, good: object, other: object, field: str, problem: str
) -> None:
    refusal = bad(tokenizer, tmp_path, {"good": good, "bad": other})
    assert refusal[0] == field and refusal[1].startswith(problem), refusal


@pytest.mark.parametrize("template", [None, "none"])
@pytest.mark.parametrize(
    ("good", "other", "field", "problem"),
    [
        (DIALOGUE + " a", DIALOGUE + " a", "bad", "equals `good`"),
        (DIALOGUE, DIALOGUE + " b", "good", "is empty after the prompt's last"),
        (DIALOGUE + " a", DIALOGUE + "\n ", "bad", "is empty after the prompt's last"),
        ("\n\nHuman: x\n\nAssistant: a", "\n\nHuman: y\n\nAssistant: b", "bad", "shares no prompt"),
        ("yes", "no", "bad", "shares no prompt with `good`"),
        (DIALOGUE + " a", DIALOGUE + " b\n\nHuman: c", "bad", "goes on with '\\n\\nHuman:'"),
        (7, DIALOGUE + " b", "good", "must be text, but is a number"),
        (DIALOGUE + " a", None, "bad", "is missing"),
    ],
)
def test_bad_dialogues(
    tokenizer: Tokenizer,
    tmp_path: Path,
    good: object,
    other: object,
    field: str,
    problem: str,
    template: str | None,
) -> None:
    refusal = bad(tokenizer, tmp_path, {"good": good, "bad": other}, template=template)
    assert refusal[0] == field and refusal[1].startswith(problem), refusal


@pytest.mark.parametrize(
    ("opening", "problem"),
    [
        ("x\n\nHuman: hi", "must begin with '\\n\\nHuman:'"),
        ("", "must begin with '\\n\\nHuman:'"),
        ("\n\nHuman: hi\n\nAssistant: \n\nHuman: x", "has no text in turn 2"),
    ],
)
def test_dialogues_that_a_chat_template_cannot_have(
    tokenizer: Tokenizer, tmp_path: Path, opening: str, problem: str
) -> None:
    row = {"good": f"{opening}\n\nAssistant: a", "bad": f"{opening}\n\nAssistant: b"}
    assert bad(tokenizer, tmp_path, row) == ("good", problem)
    assert len(load(tokenizer, tmp_path, row, template="none").items) == 1


def test_over_long_responses_are_refused_or_cut(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The prompt has 2 tokens, and the end token belongs to the response."""
    row = {"q": "hi", "good": "a" * 9, "bad": "b" * 3}
    options: dict[str, Any] = {"prompt": "q", "template": "none"}
    field, problem = bad(tokenizer, tmp_path, row, max_tokens=11, **options)
    assert field == "good" and re.search(r"12 tokens.*`data\.max_tokens: 11`", problem)
    assert len(load(tokenizer, tmp_path, row, max_tokens=12, **options).items) == 1
    options["over_long"] = "truncate"
    loaded = load(tokenizer, tmp_path, row, max_tokens=5, **options)
    [pair] = loaded.items
    assert text(tokenizer, pair) == ("hi", "aaa", "bbb") and loaded.cut_rows == 1
    assert load(tokenizer, tmp_path, row, row, max_tokens=11, **options).cut_rows == 2
    assert load(tokenizer, tmp_path, row, max_tokens=12, **options).cut_rows == 0
    alike = {"q": "hi", "good": "same then a", "bad": "same then b"}
    field, problem = bad(tokenizer, tmp_path, alike, max_tokens=11, **options)
    assert field == "bad" and re.search(r"`good`.*`data\.max_tokens: 11`", problem)


def test_two_texts_of_the_same_tokens_are_bad(tokenizer: Tokenizer, tmp_path: Path) -> None:
    blind = deepcopy(tokenizer)
    blind.backend_tokenizer.normalizer = normalizers.Lowercase()
    row = {"q": "hi", "good": "Yes", "bad": "yes"}
    field, problem = bad(blind, tmp_path, row, prompt="q", template="none")
    assert field == "bad" and re.search("tokens of `good`.*tokenizer", problem)


@pytest.mark.parametrize("over_long", ["refuse", "truncate"])
def test_a_prompt_that_leaves_no_room_is_bad(
    tokenizer: Tokenizer, tmp_path: Path, over_long: Literal["refuse", "truncate"]
) -> None:
    row = {"q": "h" * 20, "good": "a", "bad": "b"}
    options: dict[str, Any] = {"prompt": "q", "template": "none", "over_long": over_long}
    field, problem = bad(tokenizer, tmp_path, row, max_tokens=20, **options)
    assert field == "q" and "prompt of 20 tokens" in problem


def test_columns_that_are_not_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"good": [USER, YO], "bad": [USER, GO]}
    with pytest.raises(ConfigError, match=r"`data\.train\.rejected: bda`.*Did you mean 'bad'\?"):
        load(tokenizer, tmp_path, row, rejected="bda")


def test_rows_share_a_prompt_whatever_their_responses_begin_with(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """This holds for dialogues, too, if only the responses begin alike. Other messages differ."""
    rows: list[dict[str, Any]] = [
        {"good": [USER, YO], "bad": [USER, GO]},
        {"good": [USER, GO], "bad": [USER, {**GO, "content": "go on"}]},
        {"good": [MORE, YO], "bad": [MORE, GO]},
        {"good": [USER, YO, MORE, YO], "bad": [USER, YO, MORE, GO]},
        {"good": f"{DIALOGUE} I do", "bad": f"{DIALOGUE} I do not"},
        {"good": f"{DIALOGUE} I never", "bad": f"{DIALOGUE} I no"},
    ]
    loaded = load(tokenizer, tmp_path, *rows)
    prompts = [pair.prompt for pair in loaded.items]
    assert len(prompts) == len(rows) and not loaded.bad_rows
    assert prompts[0] == prompts[1] and prompts[4] == prompts[5]
    assert len({*prompts[:4]}) == 3 and prompts[0] != prompts[5]


DATA = Path(os.environ.get("PLIMSOLL_DATA", Path(__file__).parents[4] / "shared" / "data"))
HH = DATA / "hh-rlhf" / "harmless-base-test.jsonl.gz"


@pytest.mark.skipif(
    not HH.is_file(),
    reason=f"HH-RLHF is not here: set PLIMSOLL_DATA to the directory that holds {HH.name}",
)
@pytest.mark.parametrize("template", [None, "none"])
def test_hh_rlhf(tokenizer: Tokenizer, template: str | None) -> None:
    source = SourceConfig(path=str(HH), chosen="chosen", rejected="rejected")
    data = DataConfig(train=source, max_tokens=8192, on_bad_row="skip")
    loaded = load_pairs(data, source, make_template(tokenizer, template, None))
    assert [row.line for row in loaded.bad_rows] == [87, 517, 926, 1104]
    assert all(row.problem.startswith("is empty") for row in loaded.bad_rows)
    assert len(loaded.items) == 2308
    asked = {text(tokenizer, pair)[0]: pair.prompt for pair in loaded.items}
    assert len(set(asked.values())) == len(asked) == 2306
    assert all(pair.prompt == asked[text(tokenizer, pair)[0]] for pair in loaded.items)
    for pair in loaded.items:
        prompt, chosen, rejected = text(tokenizer, pair)
        end = "\n\nAssistant:" if template else "<|im_start|>assistant\n"
        assert prompt.endswith(end) and chosen != rejected
        assert "\n\nHuman:" not in chosen + rejected
