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
