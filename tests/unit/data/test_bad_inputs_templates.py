"""Chat templates, which models bring along, that loop, grow, or reach for Python's own objects."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refusal
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from plimsoll.data.pieces import TextPiece
from plimsoll.data.template import Draft, make_template, render_drafts
from plimsoll.errors import DataError
from plimsoll.model.tiny import CHAT_TEMPLATE
from plimsoll.process.templates import Rendering, RenderRequest, render

GROWS = "{{% set ns = namespace(s='a', l=[1]) %}}{{% for i in range(60) %}}{} {{% endfor %}}"
NESTS = (
    "{{% set ns = namespace(l=()) %}}{{% for i in range(99) %}}{{% set ns.l = {} %}}{{% endfor %}}"
)
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    *("{% for i in range(99999) %}{{ range(99999)|sort|list|length }}{% endfor %}",),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    GROWS.format("{% set ns.s = ns.s ~ ns.s %}"),
    GROWS.format("{% set ns.s = ns.s + ns.s %}"),
    GROWS.format("{% set ns.l = ns.l + ns.l %}"),
    GROWS.format("{% set ns.s = ns.s|replace('a', 'aaaaaaaaaa') %}"),
    GROWS.format("{% set ns.s = ns.s.replace('a', 'aaaaaaaaaa') %}"),
    *(
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ range(10**9)|list }}",
    ),
    *("{{ 'a'.center(10**10) }}", "{{ 'a'|center(10**10) }}"),
    *("{{ '%9999999999d' % 1 }}", "{{ '%*d' % (10**10, 1) }}", "{{ '%9999999999d'|format(1) }}"),
    *("{{ '{:>9999999999}'.format(1) }}", "{{ '{:>{w}}'.format(1, w=10**10) }}"),
    *("{{ range(99999)|map('string')|join('a' * 99999) }}", "{{ lipsum(100000) }}"),
    "{{ ('a\\n' * 10**4)|indent(10**6) }}",
    "{% set s = 'a' * 10**8 %}{{ ([s] * 40)|join|length }}",
    NESTS.format("[ns.l, ns.l]") + "{{ ns.l == ns.l|list }}{{ ns.l }}",
    NESTS.format("(ns.l, ns.l)") + "{{ {ns.l: 1} }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}"
    "{{ ns.l }}",
]
REACHING = [
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].content.nope.nope }}",
    "{{ messages|map('nope')|list }}",
    "{{ 1 / 0 }}",
]


@pytest.mark.parametrize("jinja", [*ENDLESS, *REACHING])
def test_a_bad_template(jinja: str, tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "hi"}]
    refusal(lambda: make_template(tokenizer, jinja, None).render_prompt(turns), "chat template")


@pytest.mark.parametrize("jinja", ["{% for %}", "{{", "{% endfor %}", "{{ a b }}", "{% nope %}"])
def test_a_template_that_is_not_valid(jinja: str, tokenizer: PreTrainedTokenizerFast) -> None:
    refusal(lambda: make_template(tokenizer, jinja, None), "line 1")


@given(
    turns=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text()), min_size=1),
    asks=st.booleans(),
    jinja=st.sampled_from(
        [
            CHAT_TEMPLATE,
            "{% for m in messages %}{{ loop.index ~ m.role ~ m.content|trim }}{% endfor %}",
            "{% for m in messages if m.content %}{{ m.content * 2 + '%s' % m.role }}{% else %}-"
            "{% endfor %}{{ none }}{{ 2 ** 3 }}{{ messages|length }}{{ eos_token }}",
        ]
    ),
)
def test_a_good_template_is_rendered_as_transformers_does(
    turns: list[tuple[str, str]], asks: bool, jinja: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    [theirs], _ = render_jinja_template(
        [messages],
        chat_template=jinja,
        add_generation_prompt=asks,
        **tokenizer.special_tokens_map,
    )
    values = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
    [ours] = render([RenderRequest(jinja, messages, asks, values)])
    assert isinstance(ours, Rendering)
    assert ours.text.encode("utf-8", "surrogatepass") == theirs.encode("utf-8", "surrogatepass")


def test_a_template_that_ends_the_process_refuses_its_own_rows_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Rows are rendered together: each row must get its own answer, in order."""
    jinja = (
        "{% if 'loop' in messages[0].content %}{% for i in range(99999) %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    template = make_template(tokenizer, jinja, None)
    contents = ["a", "loop", "b" * 3_000_000, "\u4e2d" * 2_000_000, "c" * 3_000_000, "d"]
    drafts = [
        Draft(template, "prompt", [{"role": "user", "content": content}]) for content in contents
    ]
    results = render_drafts(drafts)
    assert isinstance(results[1], DataError) and "more than 2 s" in str(results[1])
    assert isinstance(results[3], DataError) and "bytes" in str(results[3])
    for place in (0, 2, 4, 5):
        assert results[place] == (TextPiece(contents[place]),)


def test_values_that_json_lacks_are_written_as_templates_would(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Parquet has dates; a conversation of the hub has one in each turn."""
    template = make_template(tokenizer, "{{ messages[0].at }}{{ messages[0].content }}", None)
    turn = {"role": "user", "content": "hi", "at": datetime(2026, 1, 2)}
    assert template.render_prompt([turn]) == (TextPiece("2026-01-02 00:00:00hi"),)
    deep: list[object] = []
    for _ in range(2000):
        deep = [deep]
    refusal(lambda: template.render_prompt([turn | {"x": deep}]), "chat template")
