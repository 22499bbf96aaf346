"""Templates: which tokens are learned, against marks made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.data.pieces import Messages, readable_text
from plimsoll.data.template import Template, make_template
from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Bools, TokenIds

Marked = list[tuple[str, bool]]

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "no"},
]
MARKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}INSIDE{% endgeneration %}AFTER"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
FORGETS = (  # like Qwen3, drops what an earlier turn thought
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def by_hand(tokenizer: Tokenizer, marked: Marked) -> tuple[list[int], list[bool]]:
    """Return tokens and marks of texts that are each learned or not. Every byte is a token."""
    tokens: list[int] = []
    loss_mask: list[bool] = []
    for text, mark in marked:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        loss_mask += [mark] * len(ids)
    return tokens, loss_mask


def conversation(template: Template, turns: list[dict[str, str]]) -> tuple[TokenIds, Bools]:
    """Return the tokens, and whether each is learned."""
    return template.tokenize([template.render_conversation(turns)])[0]


def prompt(template: Template, turns: list[dict[str, str]]) -> tuple[TokenIds, str]:
    """Return its tokens, and the text that a person reads."""
    return template.tokenize([template.render_prompt(turns)])[0][0], readable_text(turns)


def same(actual: tuple[TokenIds, Bools], tokenizer: Tokenizer, marked: Marked) -> bool:
    assert actual[0].dtype == np.int32 and actual[1].dtype == np.bool_
    return (actual[0].tolist(), actual[1].tolist()) == by_hand(tokenizer, marked)


def test_every_assistant_turn_is_learned_with_the_token_that_ends_it(tokenizer: Tokenizer) -> None:
    actual = conversation(make_template(tokenizer, None, None), TURNS)
    expected = [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("yo<|im_end|>", True),
        ("\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n", False),
        ("no<|im_end|>", True),
        ("\n", False),
    ]
    assert same(actual, tokenizer, expected)


def test_the_byte_tokenizer_itself(tokenizer: Tokenizer) -> None:
    """The helper above depends on it: one token a byte, special tokens whole."""
    ids = tokenizer("a\n<|im_end|>é")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "Ċ", "<|im_end|>", "Ã", "©"]


@pytest.mark.parametrize(
    ("inside", "after", "loss_mask", "rest"),
    [
        ("<|im_end|>", "\n", "yo<|im_end|>", "\n"),
        ("<|im_end|>\n", "", "yo<|im_end|>", "\n"),
        ("", "<|im_end|>\n", "yo<|im_end|>", "\n"),
        ("", "\n", "yo", "\n"),
    ],
)
def test_generation_marks_are_used_and_end_with_the_turn(
    tokenizer: Tokenizer, inside: str, after: str, loss_mask: str, rest: str
) -> None:
    jinja = MARKS.replace("INSIDE", f"{{{{ {inside!r} }}}}").replace(
        "AFTER", f"{{{{ {after!r} }}}}"
    )
    actual = conversation(make_template(tokenizer, jinja, None), TURNS)
    expected = [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        (loss_mask, True),
        (rest + "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n", False),
        (loss_mask.replace("yo", "no"), True),
        (rest, False),
    ]
    assert same(actual, tokenizer, expected)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Tokenizer) -> None:
    template = make_template(tokenizer, FORGETS, None)
    thinking = [
        {**turn, "content": f"hm</think>{turn['content']}"} if i % 2 else turn
        for i, turn in enumerate(TURNS)
    ]
    assert conversation(template, thinking[:2])[1].sum() == len("hm</think>yo") + 1
    with pytest.raises(ConfigError, match=r"rewrites earlier turns.*'hm</think>yo.*'yo<.*gener"):
        conversation(template, thinking)


def test_a_prompt_ends_where_the_assistant_begins(tokenizer: Tokenizer) -> None:
    tokens, text = prompt(make_template(tokenizer, None, None), TURNS[:1])
    assert tokenizer.decode(tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text == "hi"


def test_a_long_prompt_is_readable(tokenizer: Tokenizer) -> None:
    _, text = prompt(make_template(tokenizer, None, None), TURNS[:3])
    assert text == "user: hi\n\nassistant: yo\n\nuser: bye"


WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(WORDS, WORDS)
def test_a_learned_reply_follows_the_tokens_of_the_sampled_prompt(
    tokenizer: Tokenizer, base_tokenizer: Tokenizer, question: str, answer: str
) -> None:
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    for template in (
        make_template(tokenizer, None, "Be brief."),
        make_template(base_tokenizer, "none", None),
    ):
        begun, _ = prompt(template, turns[:1])
        tokens, loss_mask = conversation(template, turns)
        n = len(begun)
        assert tokens[:n].tolist() == begun.tolist() and not loss_mask[:n].any()
        end = template.tokenizer.eos_token or ""
        assert same(
            (tokens[loss_mask], loss_mask[loss_mask]), template.tokenizer, [(answer + end, True)]
        )


def test_the_system_message_is_put_before_conversations_that_have_none(
    tokenizer: Tokenizer,
) -> None:
    template = make_template(tokenizer, None, "Be brief.")
    system_turn = {"role": "system", "content": "Be long."}
    start = "<|im_start|>system\n"
    for messages, system in ((TURNS[:1], "Be brief."), ([system_turn, *TURNS[:1]], "Be long.")):
        text = str(tokenizer.decode(prompt(template, messages)[0]))
        assert text.startswith(f"{start}{system}<|im_end|>") and text.count(start) == 1
    assert prompt(template, TURNS[:1])[1] == "hi"


def test_a_system_message_that_the_template_leaves_out_is_refused(tokenizer: Tokenizer) -> None:
    leaves_out = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"leaves.* out.*`data\.system`"):
        make_template(tokenizer, leaves_out, "Be brief.")
    refuses = "{{ raise_exception('no system') if messages[0].role == 'system' }}"
    with pytest.raises(ConfigError, match=r"refused .*: no system"):
        make_template(tokenizer, refuses, "Be brief.")
    assert make_template(tokenizer, leaves_out, None).system is None


@pytest.mark.parametrize(
    ("jinja", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "by zero"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ messages.foo() }}", "foo"),
        ("{% for i in range(10**9) %}x{% endfor %}", "[Rr]ange"),
        ("{{ messages[0].name }}", "surrogate"),
    ],
)
def test_any_error_of_a_template_is_a_refusal(
    tokenizer: Tokenizer, jinja: str, reason: str
) -> None:
    """The last template writes half of a surrogate pair, which no tokenizer takes."""
    template = make_template(tokenizer, jinja, None)
    with pytest.raises(DataError, match=rf"refused by the chat template: .*{reason}"):
        template.render_prompt([{"role": "user", "content": "hi", "name": "\ud800"}])


def test_a_tool_call_that_the_template_leaves_out_is_a_refusal(
    tokenizer: Tokenizer, base_tokenizer: Tokenizer
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    turns: Messages = [{"role": "user", "content": "2+2?"}, turn]
    with pytest.raises(DataError, match=r"tool 'add'.* chat template leaves"):
        make_template(tokenizer, None, None).render_conversation(turns)
    plain = make_template(base_tokenizer, "none", None)
    for render in (plain.render_conversation, lambda turns: plain.render_answer(turns, [])):
        with pytest.raises(DataError, match=r"\btool_calls\b.*plain text"):
            render(turns)
    writes = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    [piece] = make_template(tokenizer, writes + "{% endfor %}", None).render_whole(turns)
    assert piece.text.endswith("Let me see." + json.dumps([call]))


def test_nothing_to_tokenize_gives_nothing(tokenizer: Tokenizer) -> None:
    assert make_template(tokenizer, None, None).tokenize([]) == []


def test_plain_text_joins_contents_and_ends_once(base_tokenizer: Tokenizer) -> None:
    actual = conversation(make_template(base_tokenizer, "none", None), TURNS)
    expected = [("<s>hi", False), ("yo", True), ("bye", False), ("no</s>", True)]
    assert same(actual, base_tokenizer, expected)


@pytest.mark.parametrize("tail", ["</s>", "</s>\n"])
def test_an_end_that_a_text_has_is_not_added_again(base_tokenizer: Tokenizer, tail: str) -> None:
    ended = [*TURNS[:1], {"role": "assistant", "content": "yo" + tail}]
    plain = make_template(base_tokenizer, "none", None)
    assert same(conversation(plain, ended), base_tokenizer, [("<s>hi", False), ("yo</s>", True)])
    [(document, _)] = plain.tokenize([plain.render_whole(ended)])
    assert base_tokenizer.decode(document) == "<s>hiyo</s>"


@pytest.mark.parametrize(
    "jinja", [None, MARKS.replace("INSIDE", "").replace("AFTER", "<|im_end|>\n")]
)
def test_an_end_of_a_turn_that_a_text_has_is_not_added_again(
    tokenizer: Tokenizer, jinja: str | None
) -> None:
    template = make_template(tokenizer, jinja, None)
    ended = [*TURNS[:1], {"role": "assistant", "content": "yo<|im_end|>\n"}]
    once, twice = (conversation(template, turns) for turns in (TURNS[:2], ended))
    assert np.array_equal(once[0], twice[0]) and np.array_equal(once[1], twice[1])


def test_a_prompt_of_several_turns_is_the_same_to_every_job(tokenizer: Tokenizer) -> None:
    """It is sampled from, learned in a conversation, and put before an answer of a pair."""
    template = make_template(tokenizer, "none", None)
    answer: Messages = [{"role": "assistant", "content": "it is 42"}]
    turns: Messages = TURNS[:3]
    sampled = template.render_prompt(turns)
    assert len(sampled) == 3
    for rendered in (
        template.render_answer(turns, answer),
        template.render_conversation([*turns, *answer]),
    ):
        assert [piece.text for piece in rendered[:-1]] == [piece.text for piece in sampled]
    loss_mask = [bool(piece.loss_spans) for piece in template.render_answer(turns, answer)]
    assert loss_mask == [False, False, False, True]


def test_plain_text_stops_after_the_last_assistant_turn(base_tokenizer: Tokenizer) -> None:
    actual = conversation(make_template(base_tokenizer, "none", None), TURNS[:3])
    assert same(actual, base_tokenizer, [("<s>hi", False), ("yo</s>", True)])


def test_the_first_token_is_never_learned(tokenizer: Tokenizer) -> None:
    """No token begins a text by itself here, and the assistant speaks first."""
    actual = conversation(make_template(tokenizer, "none", None), TURNS[1:2])
    assert same(actual, tokenizer, [("y", False), ("o<|im_end|>", True)])


def test_the_beginning_is_not_doubled(base_tokenizer: Tokenizer) -> None:
    plain = make_template(base_tokenizer, "none", None)
    chat = make_template(base_tokenizer, "{{ bos_token }}{{ messages[0].content }}", None)
    spelled_out = [{"role": "user", "content": "<s>hi"}]
    for tokens, _ in (
        prompt(plain, TURNS[:1]),
        prompt(chat, TURNS[:1]),
        prompt(plain, spelled_out),
    ):
        assert base_tokenizer.decode(tokens) == "<s>hi"


def test_a_template_from_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    tokens, _ = prompt(make_template(tokenizer, str(tmp_path / "mine.jinja"), None), TURNS[:1])
    assert tokenizer.decode(tokens) == "hi!"
    with pytest.raises(ConfigError, match=r"mien\.jinja.*'mine\.jinja'\?"):
        make_template(tokenizer, str(tmp_path / "mien.jinja"), None)


def test_templates_that_cannot_work_are_refused(base_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*`data\.chat_template`.*`none`"):
        make_template(base_tokenizer, None, None)
    with pytest.raises(ConfigError, match="Jinja, line 1: Unexpected end"):
        make_template(base_tokenizer, "{% if messages %}", None)


def test_plain_text_needs_an_end(base_tokenizer: Tokenizer) -> None:
    endless = Tokenizer(tokenizer_object=base_tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="end-of-sequence token"):
        make_template(endless, "none", None)


@pytest.mark.parametrize(
    ("jinja", "end"),
    [
        (None, "<|im_end|>"),
        (MARKS, None),  # ends the assistant's turns with plain text
        ("{% for m in messages %}{{ m.content }} </s>\n{% endfor %}", "</s>"),
        (
            "{{ messages[0].content }}{{ raise_exception('prompts only') if messages|length > 1 }}",
            None,
        ),
    ],
)
def test_the_token_that_ends_a_turn(tokenizer: Tokenizer, jinja: str | None, end: str) -> None:
    assert make_template(tokenizer, jinja, None).turn_end() == end


def test_plain_text_ends_with_the_end_of_sequence(base_tokenizer: Tokenizer) -> None:
    assert make_template(base_tokenizer, "none", None).turn_end() == "</s>"


def test_the_date_is_the_one_that_is_given(tokenizer: Tokenizer) -> None:
    jinja = "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = make_template(tokenizer, jinja, None, date="2001-02-03")
    [piece] = template.render_prompt(TURNS[:1])
    assert piece.text.startswith("03 February 2001") and template.writes_date
    assert not make_template(tokenizer, None, None).writes_date


def test_chance_gives_a_conversation_the_same_text_each_time(tokenizer: Tokenizer) -> None:
    jinja = "{{ range(99999) | random }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = make_template(tokenizer, jinja, None)
    assert template.render_prompt(TURNS[:1]) == template.render_prompt(TURNS[:1])
