"""Tokens in, tokens out: what follows a sampled reply, over the common families' templates."""

from __future__ import annotations

import json
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
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.data.continuation import following, is_rewritten, rewrites
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
    """A reply with its reasoning and calls, what comes after it, and the token that ends it: the
    template's own, another, or none."""

    content: str
    thought: str | None
    calls: tuple[dict[str, Any], ...]
    after: tuple[dict[str, Any], ...]
    end: str | None

    def own_end(self, family: Family) -> str:
        """What the template would end it with: where it writes nothing, the next turn's role."""
        if family.closes:
            return family.ends[0]
        return "<|observation|>" if self.after[0]["role"] == "tool" else "<|user|>"


@dataclass
class Episode:
    """A conversation, and the tokens that an engine has seen and sampled in it.

    written: the same tokens less the sampled ends that the template does not write. kept: whether it
    has rewritten nothing so far.
    """

    family: Family = field(repr=False)
    template: Template = field(repr=False)
    messages: list[dict[str, Any]]
    ids: list[int]
    written: list[int]
    kept: bool = True

    def rendered(self) -> str:
        """By the template, up to where the model answers next."""
        [piece] = self.template.render_prompt(self.messages)
        return piece.text

    def play(self, turn: Turn) -> list[int]:
        """One turn; returns what was sampled."""
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
    template = family.template.knowing(tools)
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
@settings(max_examples=100)
@given(st.data())
def test_the_tokens_of_an_episode(family: Family, data: st.DataObject) -> None:
    """What was seen and sampled stays as it is, and reads as the conversation rendered anew for as
    long as the template rewrites nothing; not so in the turn in which it does."""
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
