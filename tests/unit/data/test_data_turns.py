"""What turns may hold: marks of what is learned, calls as turns, a system message beside them.

Also prompts and responses as turns.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, LearnedTokens, SourceConfig
from plimsoll.data.dataset import load_pairs, load_prompts, load_responses, load_samples
from plimsoll.data.loading import Loaded
from plimsoll.data.template import make_template
from plimsoll.records import Sample

U: dict[str, Any] = {"role": "user", "content": "2+2?"}
NO: dict[str, Any] = {"role": "user", "content": "No."}
FIVE: dict[str, Any] = {"role": "assistant", "content": "5"}
FOUR: dict[str, Any] = {"role": "assistant", "content": "4"}
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


def source_of(tmp_path: Path, *rows: object, **columns: str) -> SourceConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(file), **columns)  # type: ignore[arg-type]


def samples(
    tokenizer: Tokenizer,
    source: SourceConfig,
    template: str | None = None,
    learned: LearnedTokens = "assistant",
) -> Loaded[Sample]:
    data = DataConfig(train=source, on_bad_row="skip")
    return load_samples(data, source, make_template(tokenizer, template, None), learned=learned)


def shown(tokenizer: Tokenizer, sample: Sample) -> str:
    """Return all of a sample's text, with what is learned in brackets."""
    text, within = "", False
    for token, learned in zip(sample.tokens, sample.loss_mask, strict=True):
        if learned != within:
            text, within = text + ("[" if learned else "]"), bool(learned)
        text += str(tokenizer.decode([int(token)]))
    return text + ("]" if within else "")


def bad(tokenizer: Tokenizer, tmp_path: Path, turns: object, **columns: Any) -> tuple[str, str]:
    source = source_of(
        tmp_path, {"turns": turns, **columns}, {"turns": [U, FOUR]}, messages="turns"
    )
    [row] = samples(tokenizer, source, CALLS).bad_rows
    return row.field, row.problem


@pytest.mark.parametrize("template", [None, MARKED])
@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0},
        {"weight": 0.0, "loss": None},
        {"loss": False},
        {"loss_mask": 0},
        {"train": False},
        {"training": False, "weight": 0},
        {"trainable": False},
    ],
)
def test_a_turn_that_is_marked_is_read_and_not_learned(
    tokenizer: Tokenizer, tmp_path: Path, mark: dict[str, object], template: str | None
) -> None:
    """Marks of other turns do not matter: these turns are never learned."""
    likewise = {name: 1 for name, value in mark.items() if value is not None}
    rows = [[{**U, **likewise}, {**FIVE, **mark}, {**NO, **mark}, {**FOUR, **likewise}]]
    rows += [[U, {**FIVE, **likewise}, NO, {**FOUR, **mark}]]
    source = source_of(tmp_path, *({"turns": turns} for turns in rows), messages="turns")
    first, second = samples(tokenizer, source, template).items
    begin = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, first) == f"{begin}5<|im_end|>{between}[4<|im_end|>]\n"
    assert shown(tokenizer, second) == f"{begin}[5<|im_end|>]{between}4<|im_end|>\n"


def test_marks_hold_in_plain_text_and_in_pairs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    marked = {**FIVE, "weight": 0}
    source = source_of(tmp_path, {"turns": [U, marked, NO, FOUR]}, messages="turns")
    [plain] = samples(tokenizer, source, "none").items
    assert shown(tokenizer, plain) == "2+2?5No.[4<|im_end|>]"
    row = {"good": [U, marked, NO, FOUR], "bad": [U, marked, NO, FIVE]}
    source = source_of(tmp_path, row, chosen="good", rejected="bad")
    template = make_template(tokenizer, "none", None)
    [pair] = load_pairs(DataConfig(train=source), source, template).items
    assert shown(tokenizer, pair.chosen) == "2+2?5No.[4<|im_end|>]"


@pytest.mark.parametrize(
    ("mark", "field", "problem"),
    [
        ({"weight": 0.5}, "turns[1].weight", "learned: true, false, 1 or 0"),
        ({"train": "no"}, "turns[1].train", "learned: true, false, 1 or 0"),
        ({"weight": 0, "loss": True}, "turns[1]", "`weight: 0`.*`loss: true`"),
        ({"train": False}, "turns", "no assistant turn"),
    ],
)
def test_marks_that_cannot_be_followed(
    tokenizer: Tokenizer, tmp_path: Path, mark: dict[str, object], field: str, problem: str
) -> None:
    refusal = bad(tokenizer, tmp_path, [U, {**FOUR, **mark}])
    assert refusal[0] == field and re.search(problem, refusal[1]), refusal


def test_a_mark_beside_all_tokens_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"turns": [U, {**FIVE, "weight": 0}, NO, FOUR]}, {"turns": [U, {**FOUR, "weight": 1}]}]
    loaded = samples(tokenizer, source_of(tmp_path, *rows, messages="turns"), learned="all")
    [row] = loaded.bad_rows
    assert row.line == 1 and re.search(r"turn 2 .*marked.*weight", row.problem)
    assert len(loaded.items) == 1


ROME = {"name": "weather", "arguments": {"town": "Rome"}}
OSLO = {"name": "weather", "arguments": {"town": "Oslo"}}


def called(*functions: object) -> str:
    return json.dumps([{"type": "function", "function": one} for one in functions])


@pytest.mark.parametrize(
    ("turns", "calls"),
    [
        ([{"from": "function_call", "value": json.dumps(ROME)}], called(ROME)),
        ([{"from": "function_call", "value": json.dumps([ROME, OSLO])}], called(ROME, OSLO)),
        ([{"role": "tool_call", "content": json.dumps(one)} for one in (ROME, OSLO)], None),
        ([{"role": "assistant", "content": None, "function_call": ROME}], called(ROME)),
        (
            [
                {"from": "gpt", "value": "I look."},
                {"from": "function_call", "value": json.dumps(ROME)},
            ],
            "I look." + called(ROME),
        ),
    ],
)
def test_calls_as_turns_of_their_own_are_the_assistants(
    tokenizer: Tokenizer, tmp_path: Path, turns: list[object], calls: str | None
) -> None:
    """LLaMA-Factory's form, ms-swift's with parallel calls, and OpenAI's older one."""
    answered = {"from": "observation", "value": "sunny"}
    row = {"turns": [U, *turns, answered, FOUR]}
    source = source_of(tmp_path, row, messages="turns")
    [sample] = samples(tokenizer, source, CALLS).items
    assert shown(tokenizer, sample) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        f"[{calls or called(ROME, OSLO)}<|im_end|>]\n<|im_start|>tool\nsunny<|im_end|>\n"
        "<|im_start|>assistant\n[4<|im_end|>]\n"
    )


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("Rome!", "JSON: Expecting value"),
        ('{"town": "Rome"}', "without a name"),
        ("[]", "empty"),
    ],
)
def test_a_call_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, value: str, why: str
) -> None:
    turns = [U, {"from": "function_call", "value": value}, FOUR]
    field, problem = bad(tokenizer, tmp_path, turns)
    assert field == "turns[1].value" and why in problem
    assert re.search("`name`.*`arguments`", problem)


def test_a_system_message_beside_turns_is_theirs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """ShareGPT's form, in JSON and in columns, in every column of turns."""
    system_turn = {"role": "system", "content": "Be brief."}
    rows = [
        {"turns": [U, FOUR], "asked": [U], "good": [U, FOUR], "bad": [U, FIVE], "system": text}
        for text in ("Be brief.", " \n")
    ]
    rows += [{**rows[0], "turns": [system_turn, U, FOUR]}]
    template, read = make_template(tokenizer, None, None), tokenizer.decode
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for file in (source_of(tmp_path, *rows).path, str(tmp_path / "rows.parquet")):
        source = SourceConfig(path=file, messages="turns")
        texts = [read(sample.tokens) for sample in samples(tokenizer, source).items]
        assert texts[0] == texts[2] and texts[0].startswith(begin) and "system" not in texts[1]
        source = SourceConfig(path=file, chosen="good", rejected="bad")
        pairs = load_pairs(DataConfig(train=source), source, template).items
        assert read(pairs[0].rejected.tokens).startswith(begin)
        source = SourceConfig(path=file, prompt="asked")
        prompts = load_prompts(DataConfig(train=source), source, template).items
        assert read(prompts[0].tokens).startswith(begin)
        assert prompts[0].messages[0] == system_turn


OBJECTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = OBJECTS.replace("c.function.arguments | tojson", "'$' + c.function.arguments + '$'")


def one_call(arguments: object) -> list[dict[str, Any]]:
    return [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize("arguments", ['{"town": "Rome"}', {"town": "Rome"}])
@pytest.mark.parametrize(("template", "shows"), [(OBJECTS, "f{}"), (TEXTS, "f${}$")])
@pytest.mark.parametrize(
    "form", ["tool_calls", "text of tool_calls", "function_call", "turn of ShareGPT"]
)
def test_arguments_are_an_object_whatever_the_row_writes(
    tokenizer: Tokenizer, tmp_path: Path, arguments: object, template: str, shows: str, form: str
) -> None:
    """A template that takes only text, as DeepSeek's do, gets JSON text."""
    call = one_call(arguments)
    turn: dict[str, object] = {"role": "assistant", "content": None}
    if form == "turn of ShareGPT":
        turn = {"from": "function_call", "value": json.dumps(call[0]["function"])}
    elif form == "function_call":
        turn |= {"function_call": call[0]["function"]}
    else:
        turn |= {"tool_calls": call if form == "tool_calls" else json.dumps(call)}
    answered = {"role": "tool", "content": "sun"}
    source = source_of(tmp_path, {"turns": [U, turn, answered, FOUR]}, messages="turns")
    [sample] = samples(tokenizer, source, template).items
    assert shows.format('{"town": "Rome"}') in shown(tokenizer, sample)


@pytest.mark.parametrize("arguments", ["Rome", "[1]", ["Rome"], 3])
def test_arguments_that_are_no_object_are_a_bad_row(
    tokenizer: Tokenizer, tmp_path: Path, arguments: object
) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": one_call(arguments)}
    field, problem = bad(tokenizer, tmp_path, [U, turn, FOUR])
    assert field == "turns[1].tool_calls" and re.search("arguments.* no object", problem)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("", ""),
        (None, ""),
        ({"degrees": 20}, '{"degrees": 20}'),
        ([{"degrees": 20}], '[{"degrees": 20}]'),
        (20, "20"),
        ([{"type": "text", "text": "20"}], "20"),
    ],
)
def test_a_tool_may_answer_nothing_or_any_value(
    tokenizer: Tokenizer, tmp_path: Path, answer: object, text: str
) -> None:
    turns = [U, FIVE, {"role": "tool", "content": answer}, FOUR]
    [sample] = samples(tokenizer, source_of(tmp_path, {"turns": turns}, messages="turns")).items
    assert f"<|im_start|>tool\n{text}<|im_end|>" in shown(tokenizer, sample)


@pytest.mark.parametrize("empty", ["", " \n", None, [], [{"type": "text", "text": ""}]])
def test_an_empty_system_message_is_none(
    tokenizer: Tokenizer, tmp_path: Path, empty: object
) -> None:
    turn = {"role": "system", "content": empty}
    source = source_of(tmp_path, {"turns": [turn, U, FOUR]}, {"turns": [U, FOUR]}, messages="turns")
    first, second = samples(tokenizer, source).items
    assert first.tokens.tolist() == second.tokens.tolist()
    assert bad(tokenizer, tmp_path, [turn])[1] == "has no turn but empty system messages"


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("empty", ["", [{"type": "text", "text": " "}]])
def test_other_empty_turns_are_bad(
    tokenizer: Tokenizer, tmp_path: Path, role: str, empty: object
) -> None:
    refusal = bad(tokenizer, tmp_path, [U, {"role": role, "content": empty}, NO, FOUR])
    assert refusal == ("turns[1].content", "is empty")


@pytest.mark.parametrize("names", [False, True])
def test_roles_of_newer_models_are_the_usual_ones_where_a_template_has_no_such_role(
    tokenizer: Tokenizer, tmp_path: Path, names: bool
) -> None:
    turns = [{"role": "developer", "content": "Be brief."}, U, FIVE]
    source = source_of(
        tmp_path,
        {"turns": [*turns, {"role": "ipython", "content": "4"}, FOUR]},
        messages="turns",
    )
    own = "{% if messages[0].role in ['developer', 'ipython'] %}{% endif %}" if names else ""
    template = make_template(tokenizer, own + tokenizer.chat_template, "Be long.")
    data = DataConfig(train=source)
    text = shown(tokenizer, load_samples(data, source, template).items[0])
    roles = re.findall(r"<\|im_start\|>(\w+)", text)
    assert roles == (
        ["developer", "user", "assistant", "ipython", "assistant"]
        if names
        else ["system", "user", "assistant", "tool", "assistant"]
    )
    assert "Be long." not in text


ALPACA: dict[str, Any] = {"instruction": "Translate.", "input": "Good morning", "output": "Bonjour"}


def test_alpacas_columns_beside_a_prompt_of_text_are_read(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """They are read as LLaMA-Factory reads them, also from Parquet, and in pairs and prompts."""
    beside = {"system": "Be brief.", "history": [["Hi.", "Hello."]]}
    rows: list[dict[str, Any]] = [
        {**ALPACA, **beside},
        {**ALPACA, "system": "", "input": None, "history": None},
    ]
    columns = {"prompt": "instruction", "response": "output"}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    asked = chat(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Translate.\nGood morning"},
    )
    plain = chat({"role": "user", "content": "Translate."})
    for file in (source_of(tmp_path, *rows).path, str(tmp_path / "rows.parquet")):
        source = SourceConfig(path=file, **columns)  # type: ignore[arg-type]
        texts = [shown(tokenizer, sample) for sample in samples(tokenizer, source).items]
        assert texts == [f"{begin}[Bonjour<|im_end|>]\n" for begin in (asked, plain)]
    row = {**rows[0], "better": "Bonjour", "worse": "Hm"}
    source = source_of(tmp_path, row, prompt="instruction", chosen="better", rejected="worse")
    template = make_template(tokenizer, None, None)
    [pair] = load_pairs(DataConfig(train=source), source, template).items
    assert shown(tokenizer, pair.rejected) == f"{asked}[Hm<|im_end|>]\n"
    source = source_of(tmp_path, row, prompt="instruction")
    [prompt] = load_prompts(DataConfig(train=source), source, template).items
    assert tokenizer.decode(prompt.tokens) == asked and not prompt.is_text


@pytest.mark.parametrize("history", ["Hi.", [["Hi."]], [["Hi.", ""]], [{"role": "user"}]])
def test_a_history_of_another_form_is_a_bad_row(
    tokenizer: Tokenizer, tmp_path: Path, history: object
) -> None:
    row = {**ALPACA, "history": history}
    source = source_of(tmp_path, row, ALPACA, prompt="instruction", response="output")
    [refused] = samples(tokenizer, source).bad_rows
    assert refused.field == "history" and "rename the column" in refused.problem


def test_a_system_message_beside_text_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """This is the form of Orca's pairs, and of HH-RLHF's dialogues beside a system message."""
    row: dict[str, Any] = {
        "system": "Be a pirate.",
        "question": "Where?",
        "good": "Arr.",
        "bad": "Here.",
    }
    dialogue = "\n\nHuman: Where?\n\nAssistant: "
    dialogues = {**row, "good": dialogue + "Arr.", "bad": dialogue + "Here."}
    template = make_template(tokenizer, None, None)
    system = {"role": "system", "content": "Be a pirate."}
    begin = chat(system, {"role": "user", "content": "Where?"})
    for values, prompt in ((row, {"prompt": "question"}), (dialogues, {})):
        source = source_of(tmp_path, values, chosen="good", rejected="bad", **prompt)
        [pair] = load_pairs(DataConfig(train=source), source, template).items
        assert shown(tokenizer, pair.chosen) == f"{begin}[Arr.<|im_end|>]\n"


def test_a_system_message_that_is_no_text_is_a_bad_row(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert bad(tokenizer, tmp_path, [U, FOUR], system=3) == (
        "system",
        "must be text, but is a number",
    )


def test_two_system_messages_are_a_bad_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be long."}, U, FOUR]
    field, problem = bad(tokenizer, tmp_path, turns, system="Be brief.")
    assert field == "system" and re.search("another system message.*`turns`", problem)


S = {"role": "system", "content": "Add."}
CHAT = "<|im_start|>{}\n{}<|im_end|>\n"


def chat(*turns: dict[str, Any]) -> str:
    texts = (CHAT.format(turn["role"], turn["content"]) for turn in turns)
    return "".join(texts) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [None, MARKED])
def test_prompts_and_responses_as_turns(
    tokenizer: Tokenizer, tmp_path: Path, template: str | None
) -> None:
    """TRL's conversational forms. The prompt's assistant turns are not learned."""
    prompt = [S, U, FIVE, NO]
    row = {"prompt": prompt, "chosen": [FOUR], "rejected": "Six.", "completion": [FOUR, U, FIVE]}
    begin, made = chat(*prompt), make_template(tokenizer, template, None)
    source = source_of(tmp_path, row, prompt="prompt", chosen="chosen", rejected="rejected")
    [pair] = load_pairs(DataConfig(train=source), source, made).items
    assert shown(tokenizer, pair.chosen) == f"{begin}[4<|im_end|>]\n"
    assert shown(tokenizer, pair.rejected) == f"{begin}[Six.<|im_end|>]\n"
    source = source_of(tmp_path, row, prompt="prompt", response="completion")
    [sample] = samples(tokenizer, source, template).items
    rest = "[4<|im_end|>]\n" + chat(U) + "[5<|im_end|>]\n"
    assert shown(tokenizer, sample) == begin + rest
    labelled = source_of(
        tmp_path, {**row, "label": True}, prompt="prompt", response="completion", label="label"
    )
    [one] = load_responses(DataConfig(train=labelled), labelled, made).items
    assert shown(tokenizer, one.sample) == begin + rest and one.desirable


def test_prompts_of_turns_are_the_same_by_either_name(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row, template = {"asked": [S, U]}, make_template(tokenizer, None, None)
    answers = []
    for setting in ("prompt", "messages"):
        source = source_of(tmp_path, row, **{setting: "asked"})
        [prompt] = load_prompts(DataConfig(train=source), source, template).items
        answers.append((prompt.tokens.tolist(), prompt.text, prompt.messages))
    assert answers[0] == answers[1] and answers[0][1] == "system: Add.\n\nuser: 2+2?"
