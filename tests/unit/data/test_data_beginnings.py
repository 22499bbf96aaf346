"""The beginnings of a conversation from one rendering: those that rendering each of them gives."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from chat_families import FAMILIES, TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll.process import template_runner

LOOP = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
ASKS = "{% if add_generation_prompt %}[assistant|{% endif %}"
FAST = {
    "plain": LOOP + ASKS,
    "numbered": "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ m.content }}{% endfor %}"
    + ASKS,
    "after the first": "{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content }}"
    "{% endfor %}" + ASKS,
    "state": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ m.content }}{% endfor %}" + ASKS,
    "marks": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}" + ASKS,
    "looks back": "{% for m in messages %}{{ loop.previtem.role }}"
    "{{ messages[loop.index0].content }}{% endfor %}" + ASKS,
}
SLOW = {
    "asks within": "{% for m in messages %}{{ add_generation_prompt }}{{ m.content }}{% endfor %}",
    "last": "{% for m in messages %}{{ m.content }}{{ loop.last }}{% endfor %}" + ASKS,
    "length": "{{ messages | length }}" + LOOP + ASKS,
    "ahead": "{% for m in messages %}{{ messages[loop.index].role }}{{ m.content }}{% endfor %}",
    "reversed": "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}" + ASKS,
    "end": LOOP + "{% if messages[-1].role == 'user' %}[assistant|{% endif %}",
    "state at the end": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ ns.n }}",
    "filtered": "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}" + ASKS,
    "else": "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}" + ASKS,
    "leaves": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}"
    "{% endfor %}" + ASKS,
    "skips": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
    "{{ m.content }}{% endfor %}" + ASKS,
    "twice": LOOP + LOOP + ASKS,
    "peeks before": "{% for m in messages[1:] %}{{ m.role }}{% break %}{% endfor %}--"
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}" + ASKS,
    "within": "{% if true %}" + LOOP + "{% endif %}" + ASKS,
    "another after": LOOP + "{% for t in [1, 2] %}{{ t }}{% endfor %}" + ASKS,
    "counts": "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{{ m.content }}"
    "{% endfor %}{{ c.current }}",
    "draws": "{% for m in messages %}{{ m.content }}{{ [1, 2] | random }}{% endfor %}"
    "{{ [1, 2, 3] | random }}",
    "macro": "{% macro end() %}{{ ns.n }}{% endmacro %}" + LOOP + "{{ end() }}",
    "as JSON": "{{ messages | tojson }}" + LOOP,
    "as text": LOOP + "{{ messages }}",
    "refuses": "{% for m in messages %}{% if loop.index > 4 %}{{ raise_exception('many') }}"
    "{% endif %}{{ m.content }}{% endfor %}" + ASKS,
    "no loop": "{{ messages[0].content }}" + ASKS,
    "recursive": "{% for m in messages recursive %}{{ m.content }}{% endfor %}" + ASKS,
    "another name": "{% set ns = namespace(n=0) %}{% set other = ns %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ other.n }}",
    "a state in a list": "{% set ns = namespace(n=0) %}{% set held = [ns] %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ held[0].n }}",
    "list": "{{ messages is iterable }}{{ messages is mapping }}{{ (messages + messages)[0].role }}"
    + LOOP,
}
FILES = {f"{f.name}.jinja": (TEMPLATES / f"{f.name}.jinja").read_text() for f in FAMILIES}
TEXTS = st.sampled_from(["", "a", "b ", "\n", "[assistant|", "a[user|a]"])
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    roles = draw(st.lists(st.sampled_from(["user", "assistant", "tool", "system"]), max_size=6))
    found: list[dict[str, Any]] = [
        {"role": role, "content": draw(TEXTS)} for role in ["user", *roles]
    ]
    for turn in found:
        if turn["role"] == "assistant" and draw(st.integers(0, 3)) == 0:
            turn["tool_calls"] = [CALL]
        if turn["role"] == "assistant" and draw(st.integers(0, 3)) == 0:
            turn["reasoning_content"] = "hm"
    return found


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let templates be rendered here, without a limit of time; return a list that counts them."""
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    counted: list[int] = []
    once = template_runner._render_once

    def count(template: Any, turns: Any, *more: Any) -> Any:
        counted.append(1)
        return once(template, turns, *more)

    monkeypatch.setattr(template_runner, "_render_once", count)
    return counted


def replies(source: str, turns: list[dict[str, Any]], few: int) -> Any:
    beginnings = [(k, asks) for k in range(1, len(turns) + 1) for asks in (True, False)]
    values = {"bos_token": "<s>", "eos_token": "</s>", "tools": None}
    request = {
        "turns": turns, "asks": False, "values": values, "beginnings": beginnings, "date": None,
    }  # fmt: skip
    template_runner.FEW_BEGINNINGS = few
    [reply] = template_runner.answer([source, json.dumps([request])])
    return json.loads(reply)


@pytest.mark.parametrize("name", [*FAST, *SLOW, *FILES])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=conversations())
def test_beginnings_are_those_of_rendering_each(
    name: str, turns: list[dict[str, Any]], renderings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_runner, "FEW_BEGINNINGS", 4)
    source = {**FAST, **SLOW, **FILES}[name]
    assert replies(source, turns, few=0) == replies(source, turns, few=1000)


@pytest.mark.parametrize(
    "name", [*FAST, "qwen2.5.jinja", "llama3.1.jinja", "gemma2.jinja", "deepseek-v2.jinja"]
)
def test_a_long_conversation_is_rendered_a_few_times(
    name: str, renderings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_runner, "FEW_BEGINNINGS", 4)
    roles = ["user", "assistant"] * 20
    turns = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
    replies({**FAST, **FILES}[name], turns, few=4)
    assert len(renderings) <= 6, "of 81 that were asked for"
