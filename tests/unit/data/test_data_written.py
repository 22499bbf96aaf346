"""Text that a chat template leaves out is refused, with the turn and the key, and no other text.

The templates are those of common families.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, Family
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_pairs, load_prompts, load_responses, load_samples, load_steps
from plimsoll.data.loading import MarkedRows, check_written
from plimsoll.data.pieces import Messages, mark_unlearned
from plimsoll.data.template import make_template
from plimsoll.errors import DataError

SYSTEM = {"role": "system", "content": "Be  brief."}
USER = {"role": "user", "content": " What is\n4+4?\n"}
SAID = {"role": "assistant", "content": 'It "is" 8.\nYes'}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is 4."}
REASONED = {"role": "assistant", "content": "It is 4.", "reasoning_content": "Hm."}
PLAIN = (
    "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS = (  # like Qwen3, drops what an earlier turn thought
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def called(family: Family, content: str) -> list[dict[str, Any]]:
    arguments = '{"a": 1}' if family.argument_text else {"a": 1}
    function = {"name": "add", "arguments": arguments}
    calls = [{"type": "function", "id": "call00000", "function": function}]
    answer = {"role": "tool", "content": 'line "1"\n8', "name": "add", "tool_call_id": "call00000"}
    return [{"role": "assistant", "content": content, "tool_calls": calls}, answer]


def left_out(family: Family, turns: Messages) -> str | bool:
    """Return what is left out of a conversation rendered with the family's template."""
    [piece] = family.template.render_whole(turns)
    try:
        return check_written(turns, piece.text)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_template_that_writes_all_is_accepted(family: Family) -> None:
    """Trimming and quoting do not matter."""
    conversations = [[USER, SAID], [USER, SAID, USER, SAID]]
    conversations += [[USER, *called(family, ""), SAID]] if family.calls else []
    conversations += [[SYSTEM, USER]] if family.system else []
    assert {left_out(family, turns) for turns in conversations} == {False}


DROPS_REASONING = {"qwen3", "deepseek-r1", "glm-4.5"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_reasoning_that_is_left_out_is_refused_unless_it_is_not_learned(family: Family) -> None:
    turns: Messages = [USER, THOUGHT, USER, SAID]
    if family.name in DROPS_REASONING:
        fact = r"turn 2 \(assistant\).*reasoning.*`content`.*'Hm\.'.*`data\.chat_template`"
        assert re.search(fact, str(left_out(family, turns)))
        assert left_out(family, [*mark_unlearned(turns[:2]), *turns[2:]]) is True
    else:
        assert left_out(family, turns) is False
    kept = family.name in ("qwen3", "glm-4.5")  # of the last turn
    assert (left_out(family, [USER, REASONED]) is False) == kept
    assert left_out(family, [*mark_unlearned([USER, REASONED]), USER, SAID]) is True


def test_text_that_real_templates_drop_is_refused_with_the_turn() -> None:
    """Llama 3.1 writes no text beside a call; Mistral a system message only before a question."""
    known = {family.name: family for family in FAMILIES}
    turns = [USER, *called(known["llama3.1"], "Let me see."), SAID]
    message = str(left_out(known["llama3.1"], turns))
    assert re.search(r"turn 2 \(assistant\).*text.*`content`.*'Let me see\.'", message)
    message = str(left_out(known["mistral-v0.3"], [SYSTEM, USER, SAID]))
    assert re.search(r"turn 1 \(system\).* text .*`content`", message)


@given(st.lists(st.sampled_from(["4", "44", "4 4", "four"]), min_size=1, max_size=6), st.data())
def test_each_of_several_equal_texts_must_be_written(texts: list[str], data: st.DataObject) -> None:
    turns = [{"role": "user", "content": text} for text in texts]
    separated = [f"<{i}>{text}" for i, text in enumerate(texts)]
    assert check_written(turns, "|".join(separated)) is False
    dropped = data.draw(st.integers(0, len(texts) - 1))
    rest = [f"|{text}" for i, text in enumerate(texts) if i != dropped]
    within = sum(text.replace(" ", "").count(texts[dropped].replace(" ", "")) for text in rest)
    if within < sum(text.replace(" ", "") == texts[dropped].replace(" ", "") for text in texts):
        with pytest.raises(DataError, match="that the chat template leaves out"):
            check_written(turns, "".join(rest))


def source_of(tmp_path: Path, *rows: object, **columns: str) -> SourceConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(file), **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turn", "place"), [(SYSTEM, "1 (system)"), ({"role": "tool", "content": "8152"}, "1 (tool)")]
)
def test_every_job_tells_it(
    tokenizer: Tokenizer, tmp_path: Path, turn: dict[str, Any], place: str
) -> None:
    template = make_template(tokenizer, PLAIN, None)
    good: dict[str, Any] = {"turns": [USER, SAID], "asked": [USER], "no": [USER, THOUGHT]}
    row = {name: [turn, *turns] for name, turns in good.items()}
    columns: list[tuple[Any, dict[str, str]]] = [
        (load_samples, {"messages": "turns"}),
        (load_responses, {"messages": "turns", "label": "label"}),
        (load_pairs, {"chosen": "turns", "rejected": "no"}),
        (load_prompts, {"messages": "asked"}),
        (load_steps, {"messages": "asked", "steps": "steps", "labels": "labels"}),
    ]
    more = {"label": True, "steps": ["8"], "labels": [1]}
    for load, named in columns:
        source = source_of(tmp_path, {**row, **more}, {**good, **more}, **named)
        loaded = load(DataConfig(train=source, on_bad_row="skip"), source, template)
        [bad] = loaded.bad_rows
        assert bad.line == 1 and len(loaded.items) == 1 and not loaded.stripped.rows
        assert bad.problem.startswith(f"has a turn {place} with text in its `content` that the ch")


def test_a_system_message_of_the_settings_that_is_left_out_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A template that writes it only before a question passes the check of the settings."""
    jinja = (
        "{% for m in messages if m.role != 'system' %}{% if loop.last and m.role == 'user' %}"
        "{{ messages[0].content }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    source = source_of(tmp_path, {"turns": [USER, SAID]}, messages="turns")
    template = make_template(tokenizer, jinja, "Be brief.")
    with pytest.raises(DataError, match=r"`data\.system`.*chat template leaves"):
        load_samples(DataConfig(train=source), source, template)


def test_rows_whose_reasoning_is_not_learned_are_counted(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    template = make_template(tokenizer, FORGETS, None)
    turns = [USER, THOUGHT, USER, SAID]
    marked = [USER, {**THOUGHT, "train": False}, USER, SAID]
    whole = {"turns": [USER, SAID], "asked": [USER], "good": [USER, SAID], "bad": [USER, THOUGHT]}
    row = {"turns": marked, "asked": turns[:3], "good": turns, "bad": [*turns[:3], THOUGHT]}
    columns: list[tuple[Any, dict[str, str]]] = [
        (load_samples, {"messages": "turns"}),
        (load_pairs, {"chosen": "good", "rejected": "bad"}),
        (load_prompts, {"messages": "asked"}),
        (load_responses, {"chosen": "good", "rejected": "bad"}),
    ]
    for load, named in columns:
        source = source_of(tmp_path, whole, row, row, **named)
        loaded = load(DataConfig(train=source), source, template)
        assert loaded.stripped == MarkedRows(2, f"{source.path}:2") and not loaded.bad_rows
    source = source_of(tmp_path, whole, {"turns": turns}, messages="turns")
    [bad] = load_samples(DataConfig(train=source, on_bad_row="skip"), source, template).bad_rows
    assert bad.line == 2 and re.search(r"turn 2 \(assistant\).* reasoning", bad.problem)


def test_rows_that_are_rendered_already_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = make_template(tokenizer, None, None)
    ready = "".join(piece.text for piece in template.render_prompt([USER]))
    rows = ({"q": "hi", "a": "yo<|im_end|>"}, {"q": ready, "a": "yo"}, {"q": ready, "a": "no"})
    columns: list[tuple[Any, dict[str, str]]] = [
        (load_samples, {"prompt": "q", "response": "a"}),
        (load_prompts, {"prompt": "q"}),
    ]
    for load, named in columns:
        source = source_of(tmp_path, *rows, **named)
        rendered = load(DataConfig(train=source), source, template).rendered
        assert rendered == MarkedRows(2, f"{source.path}:2")
        plain = make_template(tokenizer, "none", None)
        assert load(DataConfig(train=source), source, plain).rendered == MarkedRows()


def test_plain_text_has_contents_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = source_of(tmp_path, {"turns": [USER, THOUGHT]}, {"turns": [USER, REASONED]})
    source = source.model_copy(update={"messages": "turns"})
    template = make_template(tokenizer, "none", None)
    loaded = load_samples(DataConfig(train=source, on_bad_row="skip"), source, template)
    [bad] = loaded.bad_rows
    assert bad.line == 2 and re.search(r"`reasoning_content`.*plain text.*'Hm\.'", bad.problem)
    assert len(loaded.items) == 1
