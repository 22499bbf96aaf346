"""Render conversations as text, with marks on what is learned; tokenize.py makes the tokens.

A conversation becomes `TextPiece`s: text with learned ranges of characters. Many of them are
tokenized at once. The ranges come from one of three places:
- a chat template with `{% generation %}` marks gives them itself;
- any other chat template is rendered turn by turn: an assistant turn is the text between the
  generation prompt before the turn and the end of the turn;
- without a chat template (`none`), contents are joined as they are, and each assistant turn is
  tokenized by itself, so that its boundary is the same as in sampling.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jinja2
from transformers.utils.chat_template_utils import _render_with_assistant_indices

from plimsoll.config.data import DataConfig, template_file
from plimsoll.data.jinja_limits import begin_rendering, compile_template
from plimsoll.data.pieces import (
    Messages,
    TextPiece,
    TextSpan,
    Tools,
    check_begins,
    check_calls,
    check_tools,
    close_last,
    is_learned,
    join_plain,
    learn_whole,
    mark_unlearned,
    with_end,
    without_tail,
)
from plimsoll.data.report import nearest_file
from plimsoll.data.tokenize import Tokenized, tokenize
from plimsoll.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE_ANSWER = "An answer."
_REFUSALS = (
    jinja2.TemplateError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""The errors that a template, which is a program, may raise."""


@dataclass(frozen=True, eq=False)
class Template:
    """The rules by which messages become tokens. `make_template` makes and checks it."""

    tokenizer: PreTrainedTokenizerBase
    jinja: str | None
    """The chat template; None if contents are joined as plain text."""
    system: str | None
    """The system message of the settings, for conversations without one."""
    begin: int | None
    """The token that plain text begins with; None if the tokenizer adds none or there is a chat
    template.
    """
    specials: tuple[str, ...]
    """The tokenizer's special tokens, as text."""
    vocabulary: int | None = None
    """The size of the model's vocabulary; None if it is unknown."""
    tools: Tools = ()
    """The tools that a conversation may call."""

    def with_tools(self, tools: Tools) -> Template:
        """Return the template for conversations that may call these tools.

        Raises:
            DataError: there are tools, but contents are joined as plain text, which cannot show
                them.
        """
        if tools and self.jinja is None:
            raise DataError("has tools, which plain text leaves out: write them into the prompt")
        return replace(self, tools=tools) if tools else self

    def render_prompt(self, messages: Messages) -> tuple[TextPiece, ...]:
        """Return the pieces of a prompt: not learned, and ready for the assistant's turn.

        Raises:
            DataError: the template refuses the messages.
        """
        turns = self.with_system(messages)
        if self.jinja is None:
            return join_plain(turns)
        text, _ = self._render(turns, generation_prompt=True)
        return (TextPiece(text),)

    def render_conversation(self, messages: Messages) -> tuple[TextPiece, ...]:
        """Return the pieces of a conversation, with the assistant's turns learned.

        The token that ends such a turn is learned, too.
        Turns that are marked as `UNLEARNED` are not learned.

        Raises:
            DataError: the template refuses the messages.
            ConfigError: the template does not show where turns begin and end.
        """
        turns = self.with_system(messages)
        if self.jinja is None:
            return close_last(join_plain(turns))
        if turns[0]["role"] == "assistant":
            raise DataError("begins with the assistant's turn; a prompt must come before it")
        text, marked = self._render(turns, generation_prompt=False)
        if GENERATION_MARK.search(self.jinja):
            learned = self._learned_marks(turns, marked)
            return (
                TextPiece(text, tuple(with_end(text, span, self.specials) for span in learned)),
            )
        return (TextPiece(text, tuple(self._assistant_turns(turns, text))),)

    def render_whole(self, messages: Messages) -> tuple[TextPiece, ...]:
        """Return the pieces of a conversation; all text is learned, also what the template adds."""
        turns = self.with_system(messages)
        if self.jinja is None:
            return close_last(tuple(map(learn_whole, join_plain(turns))))
        text, _ = self._render(turns, generation_prompt=False)
        return (learn_whole(TextPiece(text)),)

    def plain(self) -> Template:
        """Return the template for plain documents; errors as `make_template`.

        Only the tokens that begin and end a text are added to a document.
        """
        return make_template(self.tokenizer, "none", None, self.vocabulary)

    def render_answer(self, prompt: Messages, answer: Messages) -> tuple[TextPiece, ...]:
        """Return the pieces of a prompt, which is not learned, and of its answer."""
        return self.render_conversation([*mark_unlearned(prompt), *answer])

    def tokenize(self, rendered: Sequence[tuple[TextPiece, ...]]) -> list[Tokenized]:
        """Return the tokens of each rendered sequence, and which are learned; both of shape [n].

        The first token is never learned, as nothing predicts it.
        """
        return tokenize(self.tokenizer, rendered, self.begin, self.vocabulary)

    def turn_end(self) -> str | None:
        """Return the special token after an assistant's text; None if there is none."""
        if self.jinja is None:
            return str(self.tokenizer.eos_token)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE_ANSWER}]
        try:
            text, _ = self._render(self.with_system(turns), generation_prompt=False)
        except DataError:  # The template renders prompts only.
            return None
        after = text.rpartition(_PROBE_ANSWER)[2].lstrip()
        return max(filter(after.startswith, self.specials), key=len, default=None)

    def with_system(self, messages: Messages) -> Messages:
        """Return the messages. If they have no system message, that of the settings comes first."""
        if self.system is None or any(turn["role"] == "system" for turn in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _render(self, turns: Messages, *, generation_prompt: bool) -> tuple[str, list[TextSpan]]:
        """Return the text, and the ranges inside the template's generation marks."""
        try:
            compiled = compile_template(self.jinja or "")
            begin_rendering(compiled)
            text, marked = _render_with_assistant_indices(
                compiled,
                turns,
                list(self.tools) or None,
                None,
                generation_prompt,
                **self.tokenizer.special_tokens_map,
            )
            text.encode()  # Further keys of a message may hold invalid Unicode.
            check_tools(self.tools, text)
            check_calls(turns, text)
        except _REFUSALS as error:
            raise DataError(f"is refused by the chat template: {error}") from error
        return text, marked

    def _learned_marks(self, turns: Messages, marked: Sequence[TextSpan]) -> list[TextSpan]:
        """Return the ranges inside the generation marks of the turns that are learned.

        Rendering the conversation up to a turn shows how many ranges it has until there.
        """
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        learned: list[TextSpan] = []
        begin = 0
        for is_learned_run, run in itertools.groupby(answers, key=lambda i: is_learned(turns[i])):
            last = max(run)
            end = len(marked)
            if last != answers[-1]:
                end = len(self._render(turns[: last + 1], generation_prompt=False)[1])
            learned += marked[begin:end] if is_learned_run else ()
            begin = end
        return learned

    def _assistant_turns(self, turns: Messages, text: str) -> list[TextSpan]:
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
    """Return the template for a tokenizer, `data.chat_template` and `data.system`.

    Args:
        tokenizer: a fast tokenizer.
        chat_template: Jinja text, the path of a file with it, `none` for plain text, or None for
            the tokenizer's own.
        system: the setting `data.system`.
        vocabulary: the number of tokens that the model knows; None if it is unknown.

    Raises:
        ConfigError: there is no template, it is not valid Jinja, or the tokenizer lacks a needed
            token.
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
        begin=_begin_token(tokenizer) if plain else None,
        specials=tuple(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special),
        vocabulary=vocabulary,
    )
    _check_system(template)
    return template


def given_template(data: DataConfig) -> str | None:
    """Return the Jinja template that a config sets; None if it sets none, or no row is rendered.

    Raises:
        ConfigError: the file cannot be read.
    """
    configured = data.rendered_by
    return None if configured in (None, "none") else _read_template(configured)


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


def _begin_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that the tokenizer puts before every text by itself; None if it does not."""
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return int(bos) if adds_bos else None


def _template_text(tokenizer: PreTrainedTokenizerBase, configured: str | None) -> str:
    """Return the configured template after a check of its syntax.

    Args:
        tokenizer: the tokenizer of the model.
        configured: Jinja, the path of a file with it, or None for the tokenizer's own.

    Raises:
        ConfigError: there is no template, or it is not valid.
    """
    jinja = _chat_template(tokenizer, configured)
    try:
        compile_template(jinja)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template is not valid Jinja, line {error.lineno}: {error.message}."
        ) from error
    return jinja


def _chat_template(tokenizer: PreTrainedTokenizerBase, configured: str | None) -> str:
    if configured is not None:
        return _read_template(configured)
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path} brings no chat template to use: set"
            f" `data.chat_template` to a Jinja template or to the path of one, or to `none` to"
            f" join prompt and response as plain text."
        ) from error


def _read_template(configured: str) -> str:
    path = template_file(configured)
    if path is None:
        return configured
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"`data.chat_template: {path}` is neither a Jinja template nor `none`, and as a file"
            f" it cannot be read: {error}.{nearest_file(path)}"
        ) from error
