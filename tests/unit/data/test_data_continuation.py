"""Tokens in, tokens out: what follows a sampled reply, over the common families' templates."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from chat_families import (
    FAMILIES,
    Family,
    end_tokens,
    read,
    said,
    sampled,
    spaced_tokenizer,
    spoken,
    token_of,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.data.continuation import following, is_rewritten, most_calls, rewrites
from plimsoll.data.template import Template, make_template
from plimsoll.errors import DataError

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BY_NAME = {family.name: family for family in FAMILIES}
EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)

# `▁` stands for a space in some tokenizers, so it does not come back from their tokens.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=12)
SAID = TEXTS.map(str.strip).filter(bool)  # many templates trim what is said


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, *calls: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def call(family: Family, value: str, call_id: str = "call00001") -> dict[str, Any]:
    arguments = json.dumps({"a": value}) if family.argument_text else {"a": value}
    function = {"name": "add", "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def result(content: str, call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "content": content, "name": "add", "tool_call_id": call_id}


@dataclass(frozen=True)
class Turn:
    """A reply with its reasoning and calls, what comes after it, and the token that ends it.

    The end is the template's own, another one, or none.
    """

    content: str
    thought: str | None
    calls: tuple[dict[str, Any], ...]
    after: tuple[dict[str, Any], ...]
    end: str | None

    def own_end(self, family: Family) -> str:
        """Return how the template ends the turn: its end token, or the next turn's role."""
        if family.closes:
            return family.ends[0]
        return "<|observation|>" if self.after[0]["role"] == "tool" else "<|user|>"


@dataclass
class Episode:
    """A conversation, and the tokens that an engine has seen and sampled in it."""

    family: Family = field(repr=False)
    template: Template = field(repr=False)
    messages: list[dict[str, Any]]
    ids: list[int]
    written: list[int]
    """The same tokens without the sampled ends that the template does not write."""
    kept: bool = True
    """Whether the template has rewritten nothing so far."""

    def rendered(self) -> str:
        """Return the conversation as the template renders it, up to the next reply."""
        [piece] = self.template.render_prompt(self.messages)
        return piece.text

    def play(self, turn: Turn) -> list[int]:
        """Play one turn, and return what was sampled."""
        family, template, before, after = self.family, self.template, self.messages, turn.after
        reply = assistant(said(family, self.rendered(), turn.content, turn.thought), *turn.calls)
        ids = sampled(family, spoken(family, template, before, reply))
        end = turn.own_end(family) if turn.end == "own" else turn.end
        closing = [] if end is None else [token_of(family, end)]
        self.kept &= not is_rewritten(template, before, reply, after)
        rest = following(template, before, reply, after, [*ids, *closing], end_tokens(family))
        self.ids = [*self.ids, *ids, *closing, *rest.tolist()]
        owned = closing if end == turn.own_end(family) else []
        self.written = [*self.written, *ids, *owned, *rest.tolist()]
        self.messages = [*before, reply, *after]
        return [*ids, *closing]


def begin(family: Family, messages: list[dict[str, Any]], tools: list[Any]) -> Episode:
    template = family.template.with_tools(tools)
    [(tokens, _)] = template.tokenize([template.render_prompt(messages)])
    return Episode(family, template, messages, tokens.tolist(), tokens.tolist())


@st.composite
def turns(draw: st.DrawFn, family: Family) -> Turn:
    thought = draw(st.none() | SAID) if family.thinks else None
    calls, after = [], [user(draw(TEXTS))]
    if family.calls and draw(st.booleans()):
        calls, after = [call(family, draw(TEXTS))], [result(draw(TEXTS))]
    end = draw(st.sampled_from(["own", None, *family.ends[1:]]))
    return Turn(draw(SAID), thought, tuple(calls), tuple(after), end)


@st.composite
def episodes(draw: st.DrawFn, family: Family) -> tuple[Episode, list[Turn]]:
    tools = [ADD] if family.tools and draw(st.booleans()) else []
    system = {"role": "system", "content": draw(SAID)}
    first = [system] if family.system and draw(st.booleans()) else []
    episode = begin(family, [*first, user(draw(TEXTS))], tools)
    return episode, draw(st.lists(turns(family), min_size=1, max_size=3))


@EVERY
@given(st.data())
def test_the_tokens_of_an_episode(family: Family, data: st.DataObject) -> None:
    """Tokens that were seen and sampled stay, and read as the conversation rendered again.

    That holds as long as the template rewrites nothing, and not in the turn in which it does.
    """
    episode, drawn = data.draw(episodes(family))
    for turn in drawn:
        seen, kept = episode.ids, episode.kept
        ids = episode.play(turn)
        assert episode.ids[: len(seen) + len(ids)] == [*seen, *ids]
        if kept:
            reads = read(family, episode.written)
            assert (reads == episode.rendered()) == episode.kept
    if not episode.kept:
        assert rewrites(family.template, episode.template.tools) is not None


@pytest.mark.parametrize(
    ("name", "tools", "change"),
    [
        ("qwen2.5", [ADD], None),
        ("llama3.1", [ADD], None),
        ("gemma2", [], None),
        ("deepseek-v2", [], None),
        ("glm-4", [ADD], None),
        ("mistral-v0.3", [], r"with a system message, 'Be brief\.\\n\\nHow much.*' becomes 'How m"),
        ("mistral-v0.3", [ADD], r"; with tools, '\[AVAILABLE_TOOLS\].*' becomes '\[INST\] How"),
        ("qwen3", [ADD], r"a reply has reasoning, '<think>\\nTwice two\..*' becomes 'It is 4\.'"),
        ("glm-4.5", [ADD], r"has reasoning, '\\n<think>Twice two.*' becomes '\\n<think></think>"),
        ("deepseek-r1", [ADD], r"always, '<think>\\n' becomes 'It is 4\."),
    ],
)
def test_a_template_that_rewrites_earlier_text_is_found(
    name: str, tools: list[Any], change: str | None
) -> None:
    sentence = rewrites(BY_NAME[name].template, tools)
    if change is None:
        assert sentence is None
    else:
        start = f"^The chat template of tests/{name} rewrites earlier turns as a conversation goes"
        assert sentence is not None and re.search(f"{start} on: .*{change}.*\\.$", sentence), (
            sentence
        )


@EVERY
def test_how_many_calls_a_template_takes_in_a_turn(family: Family) -> None:
    """DeepSeek-R1's template takes arguments as text alone, and gets them so."""
    with_calls = family.tools or family.name == "deepseek-r1"
    expected = 1 if family.name == "llama3.1" else 2 if with_calls else 0
    assert most_calls(family.template) == expected


def turn(family: Family, content: str, *after: dict[str, Any], end: str | None = None) -> str:
    """Return what follows a reply to `hi`."""
    ids = sampled(family, content) + ([token_of(family, end)] if end else [])
    reply = assistant(content)
    rest = following(family.template, [user("hi")], reply, after, ids, end_tokens(family))
    return read(family, rest.tolist())


@pytest.mark.parametrize(
    ("name", "end", "follows"),
    [
        ("qwen3", "<|im_end|>", "\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", None, "<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen3",
            "<|endoftext|>",
            "<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("mistral-v0.3", "</s>", "[INST] bye[/INST]"),
        ("mistral-v0.3", None, "</s>[INST] bye[/INST]"),
        ("deepseek-v2", "<｜end▁of▁sentence｜>", "User: bye\n\nAssistant:"),
        ("glm-4", "<|user|>", "\nbye<|assistant|>"),
        ("glm-4", None, "<|user|>\nbye<|assistant|>"),
        ("glm-4", "<|observation|>", "<|user|>\nbye<|assistant|>"),
    ],
)
def test_the_rest_of_the_turn_and_what_comes_after(
    name: str, end: str | None, follows: str
) -> None:
    assert turn(BY_NAME[name], "yo", user("bye"), end=end) == follows


@EVERY
@pytest.mark.parametrize(
    "content", ["", " \n", "  yo\n\n", "yo</think>", "<|x|>", "MARK0K MARK1KR"]
)
def test_a_reply_does_not_change_the_text_after_it(family: Family, content: str) -> None:
    """Templates trim a reply, and split it at its reasoning."""
    for end in (None, family.ends[0]):
        expected = turn(family, "yo", user("bye MARK0KR"), end=end)
        assert turn(family, content, user("bye MARK0KR"), end=end) == expected
        assert "bye MARK0KR" in expected


def test_the_prompt_that_the_tokenizer_would_not_write_again() -> None:
    """These tests depend on it: the sampled tokens differ from those of the same text."""
    family = BY_NAME["qwen2.5"]
    ids = sampled(family, "the answer")
    again = family.template.tokenizer("the answer", add_special_tokens=False)["input_ids"]
    assert read(family, ids) == "the answer" and len(ids) == 10 and len(again) < 10


@pytest.mark.parametrize("prepend", ["first", "always"])
def test_no_space_comes_before_what_follows(prepend: str) -> None:
    """A tokenizer that begins a text with a space does not begin the rest of a turn with one."""
    backend = spaced_tokenizer(prepend)
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])
    tokenizer = Tokenizer(tokenizer_object=backend, eos_token="</s>")
    zephyr = "{% for m in messages %}<{{ m.role }}>\n{{ m.content + eos_token }}\n{% endfor %}"
    template = make_template(tokenizer, zephyr + "{{ '<assistant>\n' }}", None)
    before, reply, after = [user("hi")], assistant("yo"), [user("bye")]
    [whole] = template.render_prompt([*before, reply, *after])
    ids = tokenizer(whole.text, add_special_tokens=False)["input_ids"]
    end = int(tokenizer.eos_token_id)
    place = [i for i, token in enumerate(ids) if token == end][1]
    rest = following(template, before, reply, after, [5, end], [end])
    assert rest.tolist() == ids[place + 1 :]
    assert following(template, before, reply, after, [5], [end]).tolist() == ids[place:]


def test_white_space_before_the_end_is_not_written_behind_it(tokenizer: Tokenizer) -> None:
    template = make_template(
        tokenizer, "{% for m in messages %}{{ m.content }} </s>{% endfor %}", None
    )
    end = int(tokenizer.convert_tokens_to_ids("</s>"))
    for ids, follows in (([end], "bye </s>"), ([], " </s>bye </s>")):
        rest = following(template, [user("hi")], assistant("yo"), [user("bye")], ids, [end])
        assert tokenizer.decode(rest) == follows


def test_an_end_that_only_the_last_turn_has(tokenizer: Tokenizer) -> None:
    """gpt-oss stops at another token than its template writes in earlier turns."""
    template = make_template(
        tokenizer,
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        "{{ '</s>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{{ '<|im_start|>' if add_generation_prompt }}",
        None,
    )
    end = int(tokenizer.convert_tokens_to_ids("</s>"))
    for ids, follows in (([end], ""), ([], "<|im_end|>")):
        rest = following(template, [user("hi")], assistant("yo"), [user("bye")], ids, [end])
        assert tokenizer.decode(rest) == f"{follows}<|im_start|>bye<|im_end|><|im_start|>"


def test_calls_without_content_and_several_results() -> None:
    """Each template has its own form of both; the calls themselves are what was sampled."""
    results = [result("4", "call00001"), result("5", "call00002")]
    by_family = {}
    for name in ("qwen2.5", "mistral-v0.3", "deepseek-r1", "glm-4.5"):
        family = BY_NAME[name]
        calls = [call(family, "x", "call00001"), call(family, "</s>", "call00002")]
        reply = assistant(None if name == "deepseek-r1" else "", *calls)
        rest = following(
            family.template,
            [user("hi")],
            reply,
            results,
            [token_of(family, family.ends[0])],
            end_tokens(family),
        )
        by_family[name] = read(family, rest.tolist())
    assert by_family == {
        "qwen2.5": "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "mistral-v0.3": '[TOOL_RESULTS] {"content": 4, "call_id": "call00001"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": 5, "call_id": "call00002"}[/TOOL_RESULTS]',
        "deepseek-r1": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜>"
        "<｜tool▁output▁begin｜>5<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        # its turns are ended by the next one's first token, and another was sampled here
        "glm-4.5": "<|observation|>\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n"
        "</tool_response><|assistant|>",
    }


@pytest.mark.parametrize(
    ("said", "called", "ends", "follows"),
    [
        # the text that ends a turn stands behind calls, too
        ("{{ m.content }}\n--\n", "({{ f.name }} {{ f.arguments }})\n--\n", [], "\n--\n"),
        # calls are ended by a token of their own, as gpt-oss has it
        ("{{ m.content }}<|im_end|>", "({{ f.name }} {{ f.arguments }})</s>", [], "</s>"),
        ("{{ m.content }}<|im_end|>", "({{ f.name }} {{ f.arguments }})</s>", ["</s>"], ""),
        # calls are written only where there is no content, as the distilled DeepSeek-R1 has it
        (
            "{{ m.content }}</s>",
            "{% if m.content is none %}({{ f.name }} {{ f.arguments }})</s>{% endif %}",
            [],
            "</s>",
        ),
    ],
)
def test_how_calls_end(
    tokenizer: Tokenizer, said: str, called: str, ends: list[str], follows: str
) -> None:
    template = make_template(
        tokenizer,
        "{% for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        f"{called}{{% else %}}{said}{{% endif %}}{{% endfor %}}",
        None,
    )
    stops = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    ids = tokenizer.convert_tokens_to_ids(ends)
    reply = assistant(None, call(BY_NAME["qwen2.5"], "x"))
    rest = following(template, [user("hi")], reply, [user("bye")], ids, stops)
    [after] = template.render_prompt([user("bye")])
    assert tokenizer.decode(rest) == follows + after.text


@pytest.mark.parametrize(
    ("name", "after", "problem"),
    [
        (
            "gemma2",
            [result("4")],
            r"role `tool` after a reply is refused .*must alternate.*gemma2\)\. Have",
        ),
        (
            "gemma2",
            [user("a"), user("b")],
            r"role `user` after .*alternate.*gemma2\)\. Set `data\.",
        ),
        (
            "mistral-v0.3",
            [{"role": "system", "content": "a"}],
            r"role `system` .*roles must alternate.*v0\.3",
        ),
        (
            "deepseek-v2",
            [result("four")],
            "deepseek-v2 leaves out.*'four'",
        ),
        ("glm-4", [user("a"), result("4")], "glm-4 leaves out"),
        (
            "glm-4",
            [{"role": "system", "content": "a"}],
            "glm-4 moves",
        ),
    ],
)
def test_a_message_that_the_template_does_not_take_is_refused(
    name: str, after: list[Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        turn(BY_NAME[name], "yo", *after)


def test_a_conversation_that_the_template_does_not_take_is_refused(tokenizer: Tokenizer) -> None:
    llama = BY_NAME["llama3.1"]
    two = assistant("", call(llama, "x"), call(llama, "y"))
    with pytest.raises(DataError, match=r"refused .*single tool-calls.*llama3\.1"):
        following(llama.template, [user("hi")], two, [result("4")], [], [])
    silent = make_template(tokenizer, "{{ messages[0].content }}{{ messages[-1].content }}", None)
    with pytest.raises(DataError, match="leaves out a reply, 'yo'"):
        following(silent, [user("hi")], assistant("yo"), [user("bye")], [], [])


def test_the_systems_text_of_the_settings_stays_when_another_comes_later() -> None:
    family = BY_NAME["qwen2.5"]
    template = replace(family.template, system="Be brief.")
    later = {"role": "system", "content": "Be long."}
    reply = assistant("yo")
    assert not is_rewritten(template, [user("hi")], reply, [later])
    rest = following(template, [user("hi")], reply, [later], [], end_tokens(family))
    assert read(family, rest.tolist()) == (
        "<|im_end|>\n<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_later_system_message_that_is_merged_with_the_first_is_rewriting() -> None:
    later = {"role": "system", "content": "Be long."}
    for name, rewritten in (("glm-4", True), ("qwen2.5", False)):
        template = BY_NAME[name].template
        assert (
            is_rewritten(template, [user("hi")], assistant("yo"), [later, user("a")]) == rewritten
        )


def test_reasoning_in_a_field_of_its_own_counts_too() -> None:
    template = BY_NAME["qwen3"].template
    reply = {**assistant("yo"), "reasoning_content": "Hm."}
    assert is_rewritten(template, [user("hi")], reply, [user("bye")])
    assert not is_rewritten(template, [user("hi")], assistant("yo"), [user("bye")])


def test_reasoning_that_is_written_otherwise_from_the_start_counts_too() -> None:
    """Qwen3's template cuts the reasoning at its last `<think>`, and drops the rest later."""
    template = BY_NAME["qwen3"].template
    reply = assistant("<think>\n<think>\n</think>\n\nyo")
    assert is_rewritten(template, [user("hi")], reply, [user("bye")])


def test_plain_text_goes_on_with_the_contents(base_tokenizer: Tokenizer) -> None:
    """No token begins a text, and none ends it."""
    template = make_template(base_tokenizer, "none", None)
    before, after = [user("hi ")], [user("bye "), result("4")]
    reply = assistant("yo", call(BY_NAME["qwen2.5"], "x"))
    end = int(base_tokenizer.eos_token_id)
    for ids in ([5], [5, end]):
        rest = following(template, before, reply, after, ids, [end])
        assert base_tokenizer.decode(rest) == "bye 4"
    assert rewrites(template, [ADD]) is None
    assert not is_rewritten(template, before, reply, after)
    assert most_calls(template) == 2
