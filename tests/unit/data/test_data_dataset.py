"""Loading: samples and prompts, each kind of bad row, wrong columns, and GSM8K."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, EvalSource, SourceConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data import several
from plimsoll.data.dataset import load_prompts, load_samples
from plimsoll.data.fields import BadRow, RawRow
from plimsoll.data.loading import Observer
from plimsoll.data.pieces import Messages
from plimsoll.data.rows import sampled_prompt_of
from plimsoll.data.stored import StoredRows
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError, DataError
from plimsoll.resolve.columns import (
    labelled_source,
    pair_source,
    rl_source,
    sft_source,
    step_source,
)

GOOD = {"q": "1+1?", "a": "2"}
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yo"}


def config(
    tmp_path: Path,
    *rows: object,
    on_bad_row: Literal["stop", "skip"] = "skip",
    over_long: Literal["refuse", "truncate"] = "refuse",
    max_tokens: int = 100,
    **columns: str,
) -> DataConfig:
    """Write these rows and a good row of each kind after them, and return the settings."""
    file = tmp_path / "rows.jsonl"
    good = {"messages": [USER, ASSISTANT], "turns": [USER], **GOOD}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, good]), encoding="utf-8")
    columns = columns or {"prompt": "q", "response": "a"}
    return DataConfig(
        train=SourceConfig(path=str(file), **columns),  # type: ignore[arg-type]
        on_bad_row=on_bad_row,
        over_long=over_long,
        max_tokens=max_tokens,
    )


def source(data: DataConfig) -> SourceConfig:
    """Return the only source to learn from."""
    [train_source] = data.train_sources().values()
    return train_source


def bad_sample(tokenizer: Tokenizer, data: DataConfig) -> tuple[str, str]:
    """Return field and problem of the first row, which must be the only bad one."""
    loaded = load_samples(data, source(data), make_template(tokenizer, data.chat_template, None))
    (bad,) = loaded.bad_rows
    assert len(loaded.items) == 1 and bad.line == 1 and bad.file == source(data).path
    return bad.field, bad.problem


def bad_prompt(tokenizer: Tokenizer, data: DataConfig) -> tuple[str, str]:
    loaded = load_prompts(data, source(data), make_template(tokenizer, data.chat_template, None))
    (bad,) = loaded.bad_rows
    assert len(loaded.items) == 1 and bad.line == 1 and bad.file == source(data).path
    return bad.field, bad.problem


def test_samples_of_columns_and_of_messages_are_the_same(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    row = {"q": "hi", "a": "yo"}
    template = make_template(tokenizer, None, None)
    data = config(tmp_path, row)
    columns = load_samples(data, source(data), template).items
    data = config(tmp_path, messages="messages")
    messages = load_samples(data, source(data), template).items
    assert len(columns) == 2 and len(messages) == 1
    assert columns[0].tokens.tolist() == messages[0].tokens.tolist()
    assert tokenizer.decode(columns[0].tokens[columns[0].loss_mask]) == "yo<|im_end|>"


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_rows_are_the_same_in_parts_of_any_size(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(several, "ROWS_AT_ONCE", at_once)
    rows = [{"q": "one"}, {"q": None}, {"q": 3}, {"q": "four"}, {"q": "five"}]
    data, seen = config(tmp_path, *rows, prompt="q"), list[int]()
    loaded = load_prompts(
        data, source(data), make_template(tokenizer, None, None), Observer(seen.append)
    )
    assert [prompt.index for prompt in loaded.items] == [0, 3, 4, 5]
    assert [prompt.text for prompt in loaded.items] == ["one", "four", "five", "1+1?"]
    assert [bad.line for bad in loaded.bad_rows] == [2, 3]
    assert sum(seen) == 6 and max(seen) <= at_once


def test_a_column_that_no_row_has_is_refused_before_all_rows_are_read(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several, "ROWS_AT_ONCE", 2)
    seen = list[int]()
    data = config(tmp_path, *[GOOD] * 9, on_bad_row="stop", prompt="Q", response="a")
    with pytest.raises(ConfigError, match="has a column `Q`; there are `q`"):
        load_samples(
            data, source(data), make_template(tokenizer, None, None), observer=Observer(seen.append)
        )
    assert seen == [2]


def test_tokens_that_are_cut_off_are_not_kept_in_memory(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """An array that was cut would be a view of the whole one."""
    rows = [{"q": "hi", "a": "yo" * 1000}]
    data = config(tmp_path, *rows, over_long="truncate")
    template = make_template(tokenizer, None, None)
    [cut, _] = samples = load_samples(data, source(data), template).items
    asked = config(tmp_path, {"q": "yo" * 1000}, over_long="truncate", prompt="q")
    [prompt, _] = prompts = load_prompts(asked, source(asked), template).items
    assert len(cut.tokens) == len(prompt.tokens) == 100
    for items in (samples, prompts):
        assert isinstance(items, StoredRows)
        assert len(items.table.column("tokens").chunk(0).values) < 150


def test_prompts_carry_index_text_and_reference(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"q": "one", "r": 7}, {"q": None, "r": "x"}, {"q": "two", "r": 0.5}]
    rows += [{"q": "no", "r": math.nan}, {"q": "no", "r": math.inf}]
    data = config(tmp_path, *rows, {"q": "three", "r": " 8"}, prompt="q", reference="r")
    loaded = load_prompts(data, source(data), make_template(tokenizer, None, None))
    assert [(p.index, p.text, p.reference) for p in loaded.items] == [
        (0, "one", "7"),
        (2, "two", "0.5"),
        (5, "three", " 8"),
    ]
    text = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(loaded.items[0].tokens) == text
    assert all(prompt.is_text for prompt in loaded.items)
    bad = [(bad.line, bad.field, bad.problem) for bad in loaded.bad_rows]
    assert bad == [
        (2, "q", "is missing"),
        (4, "r", "is nan, which is no answer"),
        (5, "r", "is inf, which is no answer"),
        (7, "r", "is missing"),
    ]


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ({"a": "2"}, "q", "is missing"),
        ({"q": None, "a": "2"}, "q", "is missing"),
        ({"q": "1+1?"}, "a", "is missing"),
        ({"q": 7, "a": "2"}, "q", "text or .*messages.* a number$"),
        ({"q": ["1"], "a": "2"}, "q[0]", "object with role and content.* text$"),
        ({"q": [ASSISTANT], "a": "2"}, "q[0].role", "`assistant`.*last turn.*user's"),
        (
            {"q": "1+1?", "a": [USER, ASSISTANT]},
            "a[0].role",
            "`user`.*assistant's turn.*column of prompts",
        ),
        ({"q": "1+1?", "a": {}}, "a", "text or .*messages.* an object$"),
        ({"q": "1+1?", "a": True}, "a", "text or .*messages.* true or false$"),
        ({"q": " \n", "a": "2"}, "q", "is empty"),
        ({"q": "1+1?", "a": ""}, "a", "is empty"),
        ({"q": "\ud83d", "a": "2"}, "q", r"Unicode.*U\+D83D"),
    ],
)
def test_bad_columns(
    tokenizer: Tokenizer, tmp_path: Path, row: object, field: str, problem: str
) -> None:
    found_field, found_problem = bad_sample(tokenizer, config(tmp_path, row))
    assert found_field == field and re.search(problem, found_problem)


@pytest.mark.parametrize(
    ("messages", "field", "problem"),
    [
        (None, "messages", "is missing"),
        ("hi", "messages", "list of messages.* text$"),
        ([], "messages", "is empty"),
        (["hi"], "messages[0]", "object with role and content.* text$"),
        ([USER, {"content": "yo"}], "messages[1].role", "is missing"),
        ([USER, {"role": "assistant"}], "messages[1].content", "is missing"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": []}],
            "messages[1].content",
            "is missing",
        ),
        (
            [USER, {**ASSISTANT, "content": "", "tool_calls": [{"name": "add"}]}],
            "messages",
            "tool 'add'.*chat template leaves",
        ),
        ([USER, {**ASSISTANT, "content": 5}], "messages[1].content", "text.* a number$"),
        (
            [USER, {**ASSISTANT, "content": ["yo"]}],
            "messages[1].content[0]",
            "part with type and text.* text$",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "text": None}]}, ASSISTANT],
            "messages[0].content[0]",
            "part of type `image_url`.*only text",
        ),
        (
            [{"from": "humn", "value": "hi"}, ASSISTANT],
            "messages[0].from",
            "`humn`.*system, user, assistant, tool, .*human, gpt",
        ),
        ([{"from": "human"}, ASSISTANT], "messages[0].value", "is missing"),
        ([USER, {**ASSISTANT, "content": " "}], "messages[1].content", "is empty"),
        (
            [USER, {**ASSISTANT, "role": "asistant"}],
            "messages[1].role",
            r"`asistant`.*system, user, assistant, tool, .*'assistant'\?",
        ),
        ([USER], "messages", "has no assistant turn"),
        ([ASSISTANT, USER], "messages", "begins with the assistant's turn"),
    ],
)
def test_bad_messages(
    tokenizer: Tokenizer, tmp_path: Path, messages: object, field: str, problem: str
) -> None:
    data = config(tmp_path, {"messages": messages}, messages="messages")
    found_field, found_problem = bad_sample(tokenizer, data)
    assert found_field == field and re.search(problem, found_problem)


def test_a_prompt_of_messages_is_no_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = config(tmp_path, {"m": [USER]}, messages="m")
    (prompt,) = load_prompts(data, source(data), make_template(tokenizer, None, None)).items
    assert not prompt.is_text and [*prompt.messages] == [USER]


@pytest.mark.parametrize("content", [None, ""])
def test_a_turn_may_call_a_tool_and_say_nothing(
    tokenizer: Tokenizer, tmp_path: Path, content: str | None
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    data = config(tmp_path, {"turns": [USER, turn]}, messages="turns", over_long="truncate")
    writes = "{% for m in messages %}[{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}]"
    template = make_template(tokenizer, writes + "{% endfor %}", None)
    sample = load_samples(data, source(data), template).items[0]
    assert tokenizer.decode(sample.tokens) == f"[{USER['content']}][{json.dumps([call])}]"


CALL = {"function": {"name": "add", "arguments": {}}}


@pytest.mark.parametrize(
    "last", [{**ASSISTANT, "tool_calls": [CALL]}, {"role": "system", "content": "be brief"}]
)
def test_a_prompt_must_end_with_the_user(
    tokenizer: Tokenizer, tmp_path: Path, last: dict[str, Any]
) -> None:
    data = config(tmp_path, {"turns": [USER, last]}, messages="turns")
    problem = f"is `{last['role']}`, but the last turn of a prompt must be the user's"
    assert bad_prompt(tokenizer, data) == ("turns[1].role", problem)


@pytest.mark.parametrize("named", [{"messages": "turns"}, {"prompt": "turns"}])
@pytest.mark.parametrize("start", ["<think>\nIt is", "The answer is "])
def test_a_prompt_that_ends_with_the_assistants_turn_is_continued(
    tokenizer: Tokenizer, tmp_path: Path, named: dict[str, Any], start: str
) -> None:
    """transformers calls this `continue_final_message`."""
    turns = [USER, {"role": "assistant", "content": start}]
    data = config(tmp_path, {"turns": turns}, **named)
    template = make_template(tokenizer, None, None)
    prompt = load_prompts(data, source(data), template).items[0]
    text = tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    assert tokenizer.decode(prompt.tokens) == text and text.rstrip().endswith(start.rstrip())
    plain = make_template(tokenizer, "none", None)
    prompt = load_prompts(data, source(data), plain).items[0]
    assert tokenizer.decode(prompt.tokens) == USER["content"] + start
    [bad] = load_prompts(data, source(data), template, environments=["game"]).bad_rows
    assert bad.problem.startswith("ends with the assistant's turn")


@pytest.mark.parametrize(
    ("reference", "problem"),
    [(None, "is missing"), ("", "is empty"), (math.nan, "is nan, which is no answer")],
)
def test_bad_references(
    tokenizer: Tokenizer, tmp_path: Path, reference: object, problem: str
) -> None:
    data = config(tmp_path, {"q": "1+1?", "a": reference}, prompt="q", reference="a")
    assert bad_prompt(tokenizer, data) == ("a", problem)


def test_lines_that_cannot_be_read_are_listed_with_the_rest(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data = config(tmp_path)
    with Path(source(data).path).open("ab") as file:
        file.write(b"{]\n" + b'{"q": "\xe4", "a": "2"}\n' + b'{"q": 1, "a": "2"}\n')
    loaded = load_samples(data, source(data), make_template(tokenizer, None, None))
    assert [(bad.line, bad.field) for bad in loaded.bad_rows] == [(2, ""), (3, ""), (4, "q")]
    assert loaded.bad_rows[1].problem.startswith("is not UTF-8: byte 0xe4")


def test_over_long_samples_are_refused_or_cut(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Two tokens more than the prompt leave two tokens of the response."""
    rows = [{"q": "hi", "a": "x" * 50}]
    template = make_template(tokenizer, None, None)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    length = len(tokenizer(prompt)["input_ids"])

    field, problem = bad_sample(tokenizer, config(tmp_path, *rows, max_tokens=60))
    assert field == "a"
    assert problem.startswith(f"has {length + 52} tokens, over `data.max_tokens: 60`")

    data = config(tmp_path, *rows, max_tokens=length + 2, over_long="truncate")
    cut = load_samples(data, source(data), template).items[0]
    assert len(cut.tokens) == length + 2
    assert tokenizer.decode(cut.tokens[cut.loss_mask]) == "xx"


def test_a_cut_that_leaves_nothing_to_learn_is_bad(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = config(tmp_path, {"q": "x" * 80, "a": "2"}, max_tokens=60, over_long="truncate")
    field, problem = bad_sample(tokenizer, data)
    template = make_template(tokenizer, None, None)
    assert load_samples(data, source(data), template).cut_rows == 0  # it counts as bad
    assert field == "a" and re.search(r"token \d+, .*`data\.max_tokens: 60`", problem)


def test_a_template_that_leaves_out_the_assistants_text_is_refused_with_row_and_turn(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    jinja = "{{ messages[0].content }}"
    data = config(tmp_path)
    with pytest.raises(DataError, match=r":1: a: .*turn 2 \(assistant\)"):
        load_samples(data, source(data), make_template(tokenizer, jinja, None))


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        (None, "is missing"),
        ("8", "whole number.* text$"),
        (True, "whole number.* true or false$"),
        (2, r"^is 2,.* from 3 to 16, .*min_new_tokens"),
        (17, r"^is 17,.* from 3 to 16, .*min_new_tokens"),
        (8.5, r"^is 8\.5,.* from 3 to 16, .*min_new_tokens"),
        (math.nan, r"^is nan,.* from 3 to 16, .*min_new_tokens"),
    ],
)
def test_a_limit_that_sampling_cannot_keep_makes_a_bad_row(
    tokenizer: Tokenizer, tmp_path: Path, limit: object, problem: str
) -> None:
    rows = [{"q": "one", "most": limit}, {"q": "two", "most": 16}, {"q": "three", "most": 3.0}]
    data = config(tmp_path, *rows, prompt="q", max_new_tokens="most")
    template = make_template(tokenizer, None, None)
    sampling = SamplingConfig(min_new_tokens=3, max_new_tokens=16)
    loaded = load_prompts(data, source(data), template, sampling=sampling)
    bad, good_row = loaded.bad_rows
    assert (bad.line, bad.field, good_row.line) == (1, "most", 4)
    assert re.search(problem, bad.problem)
    assert [(p.max_new_tokens, p.columns) for p in loaded.items] == [(16, {}), (3, {})]


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (None, "is missing"),
        ("hard", "number.* text$"),
        (False, "number.* true or false$"),
        (math.nan, "is nan.*finite"),
    ],
)
def test_a_row_that_cannot_be_put_in_order_is_bad(
    tokenizer: Tokenizer, tmp_path: Path, number: object, problem: str
) -> None:
    rows = [{"q": "one", "level": number}, {"q": "two", "level": 3}, {"q": "three", "level": -0.5}]
    data = config(tmp_path, *rows, prompt="q", order_by="level")
    loaded = load_prompts(data, source(data), make_template(tokenizer, None, None))
    bad, good_row = loaded.bad_rows
    assert (bad.line, bad.field, good_row.line) == (1, "level", 4)
    assert re.search(problem, bad.problem)
    assert [p.order_by for p in loaded.items] == [3.0, -0.5]


def test_over_long_prompts_are_refused_or_keep_their_end(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"q": "x" * 90 + "end"}]
    field, problem = bad_prompt(tokenizer, config(tmp_path, *rows, prompt="q"))
    assert field == "q" and "over `data.max_tokens: 100`" in problem
    data = config(tmp_path, *rows, prompt="q", over_long="truncate", max_tokens=16)
    loaded = load_prompts(data, source(data), make_template(tokenizer, None, None))
    prompt = loaded.items[0]
    assert len(prompt.tokens) == 16 and loaded.cut_rows == 2
    assert tokenizer.decode(prompt.tokens) == "end<|im_end|>\n<|im_start|>assistant\n"


def test_stopping_shows_the_first_rows_and_the_way_out(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data = config(tmp_path, *[{"q": ""}] * 12, on_bad_row="stop")
    with pytest.raises(DataError) as stopped:
        load_samples(data, source(data), make_template(tokenizer, None, None))
    message = str(stopped.value)
    assert "12 of 13 rows" in message and "`--data.on_bad_row skip`" in message
    assert message.count(f"{source(data).path}:") == 10
    assert f"{source(data).path}:10: q: is empty" in message and "and 2 more" in message


def test_nothing_but_bad_rows_is_an_error_also_when_skipping(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data = config(tmp_path, {"q": "", "a": "2"}, {"q": 1, "a": "2"})
    only_bad = source(data).model_copy(update={"limit": 2})
    with pytest.raises(DataError, match=r"Every row of .* is bad \(2 rows\)"):
        load_samples(data, only_bad, make_template(tokenizer, None, None))


def test_no_rows_at_all_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = config(tmp_path)
    Path(source(data).path).write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_samples(data, source(data), make_template(tokenizer, None, None))


def test_a_column_that_no_row_has_is_a_wrong_setting(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = make_template(tokenizer, None, None)
    data = config(tmp_path, prompt="q", response="anser")
    Path(source(data).path).write_text('{"q": "1+1?", "answer": "2"}\n')
    expected = r"`data\.train\.response: anser`.*there are `q`, `answer`\. Did you mean 'answer'\?"
    with pytest.raises(ConfigError, match=expected):
        load_samples(data, source(data), template)
    held_out = data.model_copy(update={"eval": EvalSource(**source(data).model_dump())})
    with pytest.raises(ConfigError, match=r"`data\.eval\.response: anser`"):
        load_samples(held_out, held_out.eval_sources()["data.eval"], template)


@pytest.mark.parametrize(
    ("check", "columns", "message"),
    [
        (sft_source, {"messages": "m", "prompt": "q"}, "data.train.prompt is set too"),
        (sft_source, {"response": "a"}, "prompt is not given"),
        (sft_source, {"prompt": "q"}, "response is not given"),
        (rl_source, {"messages": "m", "prompt": "q"}, "data.train.prompt is set too"),
        (rl_source, {"reference": "a"}, "no column to take prompts from"),
        (pair_source, {"chosen": "c"}, "data.train.rejected"),
        (step_source, {"prompt": "q", "labels": "l"}, "data.train.steps"),
        (step_source, {"prompt": "q", "steps": "s"}, "data.train.labels"),
        (labelled_source, {"prompt": "q", "response": "a"}, "data.train.label"),
    ],
)
def test_columns_that_do_not_say_what_to_read(
    check: Callable[[str, SourceConfig], Iterator[object]], columns: dict[str, str], message: str
) -> None:
    """The config is refused before any row is read."""
    [problem] = check("data.train", SourceConfig.model_validate({"path": "x", **columns}))
    assert message in str(problem)


def test_other_keys_of_messages_reach_the_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Columnar data fills absent keys with None, which templates must not see."""
    jinja = "{% for m in messages %}{{ m.name if m.name is defined else '-' }} {{ m.content }} "
    named = [{**USER, "name": "Ann"}, {**USER, "name": None}]
    data = config(tmp_path, {"turns": named}, messages="turns")
    template = make_template(tokenizer, jinja + "{% endfor %}", None)
    prompts = load_prompts(data, source(data), template).items
    assert tokenizer.decode(prompts[0].tokens) == "Ann hi - hi "


def test_a_bad_row_reads_as_an_editor_link() -> None:
    assert str(BadRow("a.jsonl", 3, "q", "is empty")) == "a.jsonl:3: q: is empty"
    assert str(BadRow("a.jsonl", 3, "", "is not JSON")) == "a.jsonl:3: is not JSON"


DATA = Path(os.environ.get("PLIMSOLL_DATA", Path(__file__).parents[4] / "shared" / "data"))


@pytest.mark.skipif(
    not (DATA / "gsm8k").is_dir(),
    reason="GSM8K is not here: set PLIMSOLL_DATA to the directory that holds gsm8k/train.jsonl",
)
def test_gsm8k(tokenizer: Tokenizer) -> None:
    source = SourceConfig(path=str(DATA / "gsm8k"), prompt="question", response="answer", limit=500)
    data = DataConfig(train=source, max_tokens=4096)
    samples = load_samples(data, source, make_template(tokenizer, None, None)).items
    with (DATA / "gsm8k" / "train.jsonl").open(encoding="utf-8") as file:
        answers = [json.loads(line)["answer"] for line, _ in zip(file, range(500), strict=False)]
    loss_mask = [tokenizer.decode(sample.tokens[sample.loss_mask]) for sample in samples]
    assert loss_mask == [f"{answer}<|im_end|>" for answer in answers]


def test_each_row_of_prompts_is_parsed_once(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []

    def counting(row: RawRow, source: SourceConfig) -> Messages:
        parsed.append(row.line)
        return sampled_prompt_of(row, source)

    monkeypatch.setattr("plimsoll.data.dataset.sampled_prompt_of", counting)
    data = config(tmp_path, {"q": "hi"}, {"q": "ho"}, prompt="q")
    loaded = load_prompts(data, source(data), make_template(tokenizer, None, None))
    assert parsed == [1, 2, 3]
    assert [p.messages[0]["content"] for p in loaded.items][:2] == ["hi", "ho"]
