"""The chat template that a run renders with: the tokenizer's own, or one that is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from plimsoll.config.data import DataConfig, template_file
from plimsoll.data.report import nearest
from plimsoll.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def template_text(tokenizer: PreTrainedTokenizerBase, configured: str | None) -> str:
    """Valid Jinja. configured: Jinja, the path of a file with it, or None for the tokenizer's own.

    Raises ConfigError when there is none, or when it is not valid.
    """
    return _compiled(_chat_template(tokenizer, configured))


def given_template(data: DataConfig) -> str | None:
    """The Jinja that a config gives; None where it gives none, or where no row is rendered.

    Raises ConfigError where a file cannot be read.
    """
    given = data.rendered_by
    return None if given is None or given == "none" else _given(given)


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
    file = template_file(configured)
    return configured if file is None else _read_template(file)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        raise ConfigError(
            f"`data.chat_template: {path}` is neither a Jinja template nor `none`, and as a file"
            f" it cannot be read: {error}.{nearest(path.name, (file.name for file in beside))}"
        ) from error


def _compiled(jinja: str) -> str:
    try:
        render_jinja_template(conversations=[], chat_template=jinja)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template is not valid Jinja, line {error.lineno}: {error.message}."
        ) from error
    return jinja
