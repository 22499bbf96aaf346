"""Chat templates, which models bring along, that loop, grow, or reach for Python's own objects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refusal
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from plimsoll.data.template import make_template
from plimsoll.errors import DataError
from plimsoll.model.tiny import CHAT_TEMPLATE

GROWS = "{{% set ns = namespace(s='a', l=[1]) %}}{{% for i in range(60) %}}{} {{% endfor %}}"
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    *("{% for i in range(99999) %}{{ range(99999)|sort|list|length }}{% endfor %}",),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    GROWS.format("{% set ns.s = ns.s ~ ns.s %}"),
    GROWS.format("{% set ns.s = ns.s + ns.s %}"),
    GROWS.format("{% set ns.l = ns.l + ns.l %}"),
    GROWS.format("{% set ns.s = ns.s|replace('a', 'aaaaaaaaaa') %}"),
    GROWS.format("{% set ns.s = ns.s.replace('a', 'aaaaaaaaaa') %}"),
    *("{{ 'a' * 10**10 }}", "{{ [1] * 10**9 }}", "{{ 10 ** 10 ** 10 }}", "{{ range(10**9)|list }}"),
    *("{{ 'a'.center(10**10) }}", "{{ 'a'|center(10**10) }}", "{{ 'a'|indent(10**9) }}"),
    *("{{ '%9999999999d' % 1 }}", "{{ '%*d' % (10**10, 1) }}", "{{ '%9999999999d'|format(1) }}"),
    *("{{ '{:>9999999999}'.format(1) }}", "{{ '{:>{w}}'.format(1, w=10**10) }}"),
    *("{{ range(99999)|map('string')|join('a' * 99999) }}", "{{ lipsum(100000) }}"),
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
    template = make_template(tokenizer, jinja, None)
    refusal(lambda: template.render_prompt([{"role": "user", "content": "hi"}]), "chat template")


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
    template = make_template(tokenizer, jinja, None)
    try:
        text, _ = template._render(messages, generation_prompt=asks)
    except DataError as error:  # of invalid Unicode
        assert "surrogates" in str(error)
    else:
        assert text == theirs
