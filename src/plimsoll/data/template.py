"""Conversations -> text, with a mark on what is to be learned; tokenize.py makes tokens of it.

A conversation is rendered to `Piece`s, text with learned ranges of characters; many of them are
tokenized at once. Where the ranges come from:
- a chat template with `{% generation %}` marks says it itself;
- any other chat template is rendered turn by turn: an assistant turn is what the text gains
  between the generation prompt before the turn and the end of the turn;
- without a chat template (`none`) contents are joined as they are, and each assistant turn is
  tokenized by itself, which is the boundary that sampling has too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from plimsoll.config.data import DataConfig, template_file
from plimsoll.data.pieces import (
    Messages,
    Piece,
    Span,
    Tools,
    check_begins,
    check_calls,
    check_tools,
    close_last,
    is_learned,
    join_plain,
    learn_whole,
    unlearned,
    with_end,
    without_tail,
)
from plimsoll.data.report import nearest
from plimsoll.data.tokenize import Tokenized, tokenize
from plimsoll.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SAID = "An answer."
_REFUSALS = (
    jinja2.TemplateError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
)
"""What a template, which is a program, may raise."""


@dataclass(frozen=True, eq=False)
class Template:
    """How messages become tokens; made by `make_template`, which checks that it can work.

    jinja: the chat template; None joins contents as plain text.
    begin: the token that plain text begins with, where the tokenizer wants one (a chat template
        writes its own).
    specials: the tokenizer's special tokens, as text.
    vocabulary: tokens from this number on are refused; None where the model's is not known.
    tools: what a conversation may call.
    """

    tokenizer: PreTrainedTokenizerBase
    jinja: str | None
    system: str | None
    begin: int | None
    specials: tuple[str, ...]
    vocabulary: int | None = None
    tools: Tools = ()

    def knowing(self, tools: Tools) -> Template:
        """The template for a conversation that may call these. DataError where contents are joined
        as plain text, which says nothing of them."""
        if tools and self.jinja is None:
            raise DataError("has tools, which plain text leaves out: write them into the prompt")
        return replace(self, tools=tools) if tools else self

    def render_prompt(self, messages: Messages) -> tuple[Piece, ...]:
        """The pieces of a prompt: not learned, ready for the assistant's turn. Raises DataError
        when the template refuses the messages."""
        turns = self.with_system(messages)
        if self.jinja is None:
            return join_plain(turns)
        text, _ = self._render(turns, generation_prompt=True)
        return (Piece(text),)

    def render_conversation(self, messages: Messages) -> tuple[Piece, ...]:
        """The pieces of a conversation, with the assistant's turns learned that are not marked as
        `UNLEARNED`, and the token that ends each. Raises DataError when the template refuses the
        messages, ConfigError when it does not show where turns are."""
        turns = self.with_system(messages)
        if self.jinja is None:
            return close_last(join_plain(turns))
        if turns[0]["role"] == "assistant":
            raise DataError("begins with the assistant's turn; a prompt must come before it")
        text, marked = self._render(turns, generation_prompt=False)
        if GENERATION_MARK.search(self.jinja):
            learned = self._learned_marks(turns, marked)
            return (Piece(text, tuple(with_end(text, span, self.specials) for span in learned)),)
        return (Piece(text, tuple(self._assistant_turns(turns, text))),)

    def render_whole(self, messages: Messages) -> tuple[Piece, ...]:
        """The pieces of a conversation, with all of its text learned, the template's own too."""
        turns = self.with_system(messages)
        if self.jinja is None:
            return close_last(tuple(map(learn_whole, join_plain(turns))))
        text, _ = self._render(turns, generation_prompt=False)
        return (learn_whole(Piece(text)),)

    def plain(self) -> Template:
        """The template of the same tokenizer for documents: nothing is put around them but the
        tokens that begin and end a text; ConfigError as `make_template`."""
        return make_template(self.tokenizer, "none", None, self.vocabulary)

    def render_answer(self, prompt: Messages, answer: Messages) -> tuple[Piece, ...]:
        """The pieces of a prompt and of what answers it: as `render_conversation` of both, but the
        assistant's turns within the prompt are not learned."""
        return self.render_conversation([*unlearned(prompt), *answer])

    def tokenize(self, rendered: Sequence[tuple[Piece, ...]]) -> list[Tokenized]:
        """Tokens and learned marks, both of shape [n], of each rendered prompt or conversation.

        The first token is never learned, as nothing predicts it.
        """
        return tokenize(self.tokenizer, rendered, self.begin, self.vocabulary)

    def turn_end(self) -> str | None:
        """The special token that comes after what the assistant says; None where none does."""
        if self.jinja is None:
            return str(self.tokenizer.eos_token)
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        try:
            text, _ = self._render(self.with_system(said), generation_prompt=False)
        except DataError:  # a template for prompts alone
            return None
        after = text.rpartition(_SAID)[2].lstrip()
        return max(filter(after.startswith, self.specials), key=len, default=None)

    def with_system(self, messages: Messages) -> Messages:
        """The messages after the system message of the settings, unless they have one."""
        if self.system is None or any(turn["role"] == "system" for turn in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _render(self, turns: Messages, *, generation_prompt: bool) -> tuple[str, list[Span]]:
        """The text, and the ranges inside the template's generation marks."""
        try:
            texts, marked = render_jinja_template(
                conversations=[turns],
                tools=list(self.tools) or None,
                chat_template=self.jinja,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=bool(GENERATION_MARK.search(self.jinja or "")),
                **self.tokenizer.special_tokens_map,
            )
            texts[0].encode()  # what a message has besides may be no valid Unicode
            check_tools(self.tools, texts[0])
            check_calls(turns, texts[0])
        except _REFUSALS as error:
            raise DataError(f"is refused by the chat template: {error}") from error
        return texts[0], marked[0] if marked else []

    def _learned_marks(self, turns: Messages, marked: Sequence[Span]) -> list[Span]:
        """The ranges inside the generation marks of the turns that are learned. How many a turn has
        is seen from the conversation up to it."""
        said = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        learned: list[Span] = []
        begin = 0
        for is_in, run in itertools.groupby(said, key=lambda i: is_learned(turns[i])):
            last = max(run)
            end = len(marked)
            if last != said[-1]:
                end = len(self._render(turns[: last + 1], generation_prompt=False)[1])
            learned += marked[begin:end] if is_in else ()
            begin = end
        return learned

    def _assistant_turns(self, turns: Messages, text: str) -> list[Span]:
        spans = []
        for i, turn in enumerate(turns):
            if is_learned(turn):
                before, _ = self._render(turns[:i], generation_prompt=True)
                after = text
                if i + 1 < len(turns):
                    after, _ = self._render(turns[: i + 1], generation_prompt=False)
                check_begins(text, after, turn=i + 1)
                check_begins(after, before, turn=i + 1)
                spans.append(without_tail(text, (len(before), len(after)), self.specials))
        return spans


def make_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    system: str | None,
    vocabulary: int | None = None,
) -> Template:
    """The template for a fast tokenizer and the settings `data.chat_template`, `data.system`.

    chat_template: Jinja text, the path of a file with it, `none` for plain text, or None for
        the tokenizer's own. vocabulary: of the model; see `Template`.
    Raises ConfigError when there is no template, when it is not valid Jinja, or when the
    tokenizer lacks what is needed.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path} ({type(tokenizer).__name__}) cannot say which"
            f" characters a token covers: use a fast tokenizer (one with a tokenizer.json)."
        )
    plain = chat_template == "none"
    if plain and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"Plain text (`data.chat_template: none`, or a column `text`) is ended by the"
            f" end-of-sequence token, but the tokenizer {tokenizer.name_or_path} has none: set its"
            f" `eos_token`."
        )
    template = Template(
        tokenizer=tokenizer,
        jinja=None if plain else _template_text(tokenizer, chat_template),
        system=system,
        begin=_begin(tokenizer) if plain else None,
        specials=tuple(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special),
        vocabulary=vocabulary,
    )
    _check_system(template)
    return template


def given_template(data: DataConfig) -> str | None:
    """The Jinja that a config gives; None where it gives none, or where no row is rendered.

    Raises ConfigError where a file cannot be read.
    """
    given = data.rendered_by
    return None if given is None or given == "none" else _given(given)


def _check_system(template: Template) -> None:
    if template.system is None:
        return
    try:
        pieces = template.render_prompt([{"role": "user", "content": "?"}])
    except DataError as error:
        raise ConfigError(f"`data.system` {error}. Leave it out.") from error
    if template.system.strip() not in "".join(piece.text for piece in pieces):
        raise ConfigError(
            "The chat template leaves system messages out, so `data.system` would have no effect:"
            " leave it out, or set `data.chat_template` to a template that writes them."
        )


def _begin(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the tokenizer puts before every text by itself, if it does."""
    bos = tokenizer.bos_token_id
    adds = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return int(bos) if adds else None


def _template_text(tokenizer: PreTrainedTokenizerBase, configured: str | None) -> str:
    """Valid Jinja. configured: Jinja, the path of a file with it, or None for the tokenizer's own.

    Raises ConfigError when there is none, or when it is not valid.
    """
    jinja = _chat_template(tokenizer, configured)
    try:
        render_jinja_template(conversations=[], chat_template=jinja)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template is not valid Jinja, line {error.lineno}: {error.message}."
        ) from error
    return jinja


def _chat_template(tokenizer: PreTrainedTokenizerBase, configured: str | None) -> str:
    if configured is not None:
        return _given(configured)
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path} brings no chat template to use: set"
            f" `data.chat_template` to a Jinja template or to the path of one, or to `none` to"
            f" join prompt and response as plain text."
        ) from error


def _given(configured: str) -> str:
    path = template_file(configured)
    if path is None:
        return configured
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        raise ConfigError(
            f"`data.chat_template: {path}` is neither a Jinja template nor `none`, and as a file"
            f" it cannot be read: {error}.{nearest(path.name, (file.name for file in beside))}"
        ) from error
