"""Render conversations as text, with marks on what is learned; pieces.py makes the tokens.

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
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from plimsoll.config.data import DataConfig, template_file
from plimsoll.data.fields import nearest_file
from plimsoll.data.pieces import (
    SYSTEM_ROLES,
    USUAL_ROLE,
    ChatTurn,
    Messages,
    TextPiece,
    TextSpan,
    Tokenized,
    Tools,
    check_begins,
    check_calls,
    check_tools,
    close_last,
    is_learned,
    join_plain,
    learn_whole,
    mark_unlearned,
    tokenize,
    with_end,
    without_end,
    without_tail,
)
from plimsoll.errors import ConfigError, DataError
from plimsoll.process.templates import Rendering, RenderRequest, check_template, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE_ANSWER = "An answer."
_DATE_FORMAT = re.compile(r"""strftime_now\(\s*["']([^"']*)["']\s*\)""")

T = TypeVar("T")


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
    date: str | None = None
    """The date that the chat template may write, as ISO 8601; None: that of rendering."""
    tools: Tools = ()
    """The tools that a conversation may call."""

    @property
    def writes_date(self) -> bool:
        """Whether the chat template asks for the date."""
        return "strftime_now" in (self.jinja or "")

    @property
    def dates(self) -> list[str]:
        """What the chat template writes of the date; all of it, if that is not known."""
        if not self.writes_date or self.date is None:
            return []
        formats = _DATE_FORMAT.findall(self.jinja or "")
        if len(formats) < (self.jinja or "").count("strftime_now"):
            return [self.date]
        return [datetime.fromisoformat(self.date).strftime(format_) for format_ in formats]

    @cached_property
    def variables(self) -> Mapping[str, Any]:
        """The variables of the chat template besides the messages."""
        tools = list(self.tools) or None
        return {**self.tokenizer.special_tokens_map, "tools": tools, "documents": None}

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """A pattern of the tokenizer's special tokens."""
        return re.compile("|".join(map(re.escape, self.specials)) or r"(?!)")

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """The special tokens that the chat template writes into a conversation of its own."""
        end = self.turn_end()
        try:
            pieces = self.render_prompt([{"role": "user", "content": "?"}])
        except DataError:  # The template wants further turns.
            pieces = ()
        written = self.special_pattern.findall("".join(piece.text for piece in pieces))
        return frozenset(written if end is None else [*written, end])

    @property
    def roles(self) -> Mapping[str, str]:
        """The usual role for each role that the chat template does not name."""
        return _missing_roles(self.jinja or "")

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

        A last turn of the assistant's is to be continued.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._render("prompt", messages)

    def render_conversation(self, messages: Messages) -> tuple[TextPiece, ...]:
        """Return the pieces of a conversation, with the assistant's turns learned.

        The token that ends such a turn is learned, too.
        Turns that are marked as `UNLEARNED` are not learned.

        Raises:
            DataError: the template refuses the messages.
            ConfigError: the template does not show where turns begin and end.
        """
        return self._render("conversation", messages)

    def render_whole(self, messages: Messages) -> tuple[TextPiece, ...]:
        """Return the pieces of a conversation; all text is learned, also what the template adds."""
        return self._render("whole", messages)

    def _render(self, kind: DraftKind, messages: Messages) -> tuple[TextPiece, ...]:
        [pieces] = render_drafts([Draft(self, kind, messages)])
        if isinstance(pieces, ConfigError):
            raise pieces
        return pieces

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
            [piece] = self.render_whole(turns)
        except DataError:  # The template renders prompts only.
            return None
        after = piece.text.rpartition(_PROBE_ANSWER)[2].lstrip()
        return max(filter(after.startswith, self.specials), key=len, default=None)

    def with_system(self, messages: Messages) -> Messages:
        """Return the messages. If they have no system message, that of the settings comes first."""
        if self.system is None or any(turn["role"] in SYSTEM_ROLES for turn in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


@lru_cache(maxsize=16)
def _missing_roles(jinja: str) -> Mapping[str, str]:
    names = frozenset(re.findall(r"""['"](\w+)['"]""", jinja))
    return {role: usual for role, usual in USUAL_ROLE.items() if role not in names}


DraftKind = Literal["prompt", "conversation", "whole"]
"""Which method of `Template` renders the turns: `render_prompt`, and so on."""


@dataclass(frozen=True)
class Draft:
    """A conversation that is to be rendered."""

    template: Template
    kind: DraftKind
    turns: Messages


def render_drafts(drafts: Sequence[Draft]) -> list[tuple[TextPiece, ...] | ConfigError]:
    """Return the pieces of each conversation, or the error that refuses it; all in one go.

    The arguments of calls are objects. A template that refuses these may take JSON text, as
    DeepSeek's do.
    """
    drafts = [replace(draft, turns=_prepare_turns(draft.template, draft.turns)) for draft in drafts]
    results = _render_prepared(drafts)
    texts = {
        i: replace(draft, turns=_with_text_arguments(draft.turns))
        for i, (draft, result) in enumerate(zip(drafts, results, strict=True))
        if isinstance(result, DataError) and any(turn.get("tool_calls") for turn in draft.turns)
    }
    for i, result in zip(texts, _render_prepared([*texts.values()]), strict=True):
        results[i] = results[i] if isinstance(result, ConfigError) else result
    return results


def _prepare_turns(template: Template, turns: Messages) -> Messages:
    """Return the turns for the template, with the settings' system message and usual roles."""
    turns = [
        {**turn, "role": template.roles[turn["role"]]} if turn["role"] in template.roles else turn
        for turn in template.with_system(turns)
    ]
    return _without_ends(template, turns)


def _with_text_arguments(turns: Messages) -> Messages:
    def with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**turn, "tool_calls": [*map(with_text, turn["tool_calls"])]}
        if turn.get("tool_calls")
        else turn
        for turn in turns
    ]


def _render_prepared(drafts: Sequence[Draft]) -> list[tuple[TextPiece, ...] | ConfigError]:
    plans = [_attempt(partial(_plan, draft)) for draft in drafts]
    asked = [plan for plan in plans if isinstance(plan, RenderRequest)]
    renderings = iter(render(asked))
    return [
        _attempt(partial(_pieces, draft, next(renderings)))
        if isinstance(plan, RenderRequest)
        else plan
        for draft, plan in zip(drafts, plans, strict=True)
    ]


def _without_ends(template: Template, turns: Messages) -> Messages:
    """Return the turns; an assistant's text loses the end of its turn, which the template adds."""
    if template.jinja is None:
        return turns

    def close(turn: ChatTurn) -> ChatTurn:
        text = str(turn.get("content") or "")
        if turn["role"] != "assistant" or not text.rstrip().endswith(template.specials):
            return turn
        return {**turn, "content": without_end(text, template.turn_end())}

    return [*map(close, turns)]


def has_control_tokens(draft: Draft) -> bool:
    """Return whether the text of a turn has special tokens that the chat template itself writes.

    The end of an assistant's turn at the end of its text does not count.
    """
    template = draft.template
    texts = [str(turn["content"]) for turn in _without_ends(template, draft.turns)]
    if template.jinja is None or not any(map(template.special_pattern.search, texts)):
        return False
    return any(token in text for token in template.control_tokens for text in texts)


def _attempt(work: Callable[[], T]) -> T | ConfigError:
    try:
        return work()
    except ConfigError as error:
        return error


def _plan(draft: Draft) -> RenderRequest | tuple[TextPiece, ...]:
    """Return what to ask of the process that renders; the pieces themselves for plain text."""
    template, kind, turns = draft.template, draft.kind, draft.turns
    if template.jinja is None:
        pieces = join_plain(turns)
        if kind == "whole":
            pieces = tuple(map(learn_whole, pieces))
        return pieces if kind == "prompt" else close_last(pieces)
    if kind == "conversation" and turns[0]["role"] == "assistant":
        raise DataError("begins with the assistant's turn; a prompt must come before it")
    beginnings: list[tuple[int, bool]] = []
    if kind == "conversation" and GENERATION_MARK.search(template.jinja):
        beginnings = [(last + 1, False) for _, last in _runs(turns)[:-1]]
    elif kind == "conversation":
        learned = [i for i, turn in enumerate(turns) if is_learned(turn)]
        beginnings = [cut for i in learned for cut in ((i, True), (i + 1, False))]
        beginnings = [cut for cut in beginnings if cut != (len(turns), False)]  # is the whole
    asks = kind == "prompt" and turns[-1]["role"] != "assistant"
    variables = template.variables
    return RenderRequest(template.jinja, turns, asks, variables, beginnings, template.date)


def _pieces(draft: Draft, rendering: Rendering | DataError) -> tuple[TextPiece, ...]:
    """Return the pieces of a draft that was rendered; raise the error that refused it."""
    if isinstance(rendering, DataError):
        raise rendering
    template, text = draft.template, rendering.text
    assert template.jinja is not None
    try:
        text.encode()  # Further keys of a message may hold invalid Unicode.
        check_tools(template.tools, text)
        check_calls(draft.turns, text)
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise DataError(f"is refused by the chat template: {error}") from error
    if draft.kind == "prompt":
        return (TextPiece(_until_continued(text, draft.turns[-1])),)
    if draft.kind == "whole":
        return (learn_whole(TextPiece(text)),)
    if GENERATION_MARK.search(template.jinja):
        return (TextPiece(text, tuple(_marked_spans(draft, rendering))),)
    return (TextPiece(text, tuple(_turn_spans(draft, rendering))),)


def _until_continued(text: str, last: ChatTurn) -> str:
    """Return a prompt's text; if its last turn is the assistant's, up to the end of its content."""
    if last["role"] != "assistant":
        return text
    whole = str(last["content"]).lstrip()
    content = whole if whole in text else whole.rstrip()
    before, found, _ = text.rpartition(content)
    if not found:
        raise DataError("ends with the assistant's turn, and the chat template changes its text")
    return before + found


def _runs(turns: Messages) -> list[tuple[bool, int]]:
    """Return the runs of assistant turns that are all learned or not: whether, and the last."""
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    runs = itertools.groupby(answers, key=lambda i: is_learned(turns[i]))
    return [(learned, max(run)) for learned, run in runs]


def _marked_spans(draft: Draft, rendering: Rendering) -> Iterator[TextSpan]:
    """Yield the ranges inside the generation marks of the turns that are learned.

    Rendering the conversation up to a turn shows how many ranges it has until there.
    """
    marks = [*(marks for _, marks in rendering.beginnings()), len(rendering.spans)]
    begin = 0
    for (learned, _), end in zip(_runs(draft.turns), marks, strict=False):
        for span in rendering.spans[begin:end] if learned else ():
            yield with_end(rendering.text, span, draft.template.specials)
        begin = end


def _turn_spans(draft: Draft, rendering: Rendering) -> Iterator[TextSpan]:
    """Yield the ranges of learned turns, from the generation prompt before each to its end."""
    learned = [i for i, turn in enumerate(draft.turns) if is_learned(turn)]
    text, whole = rendering.text, (len(rendering.text), "", 0)
    parts, checked = iter(rendering.parts), 0
    for i in learned:
        (before, lacks, _), (after, differs, _) = next(parts), next(parts, whole)
        if differs or lacks or before > after:
            check_begins(text, text[:after] + differs, turn=i + 1)
            check_begins(text[:after], text[:before] + lacks, turn=i + 1)
        if not checked:  # later text may have a tool's name by chance
            check_tools(draft.template.tools, text[:before])
        check_calls(draft.turns[checked:i], text, before)
        checked = i
        yield without_tail(text, (before, after), draft.template.specials)


def make_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    system: str | None,
    vocabulary: int | None = None,
    date: str | None = None,
) -> Template:
    """Return the template for a tokenizer, `data.chat_template` and `data.system`.

    Args:
        tokenizer: a fast tokenizer.
        chat_template: Jinja text, the path of a file with it, `none` for plain text, or None for
            the tokenizer's own.
        system: the setting `data.system`.
        vocabulary: the number of tokens that the model knows; None if it is unknown.
        date: the setting `data.date`.

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
        jinja=None if plain else _chat_template(tokenizer, chat_template),
        system=system,
        begin=_begin_token(tokenizer) if plain else None,
        specials=tuple(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special),
        vocabulary=vocabulary,
        date=date,
    )
    if template.jinja is not None:
        check_template(template.jinja)
    _check_system(template)
    return template


def given_template(data: DataConfig) -> str | None:
    """Return the Jinja template that a config sets; `none` if no row is rendered.

    None: rows are rendered by the tokenizer's own template.

    Raises:
        ConfigError: the file cannot be read.
    """
    configured = data.rendered_by
    return configured if configured in (None, "none") else _read_template(configured)


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


def _chat_template(tokenizer: PreTrainedTokenizerBase, configured: str | None) -> str:
    """Return the configured template: Jinja, a file's content, or (None) the tokenizer's own."""
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
