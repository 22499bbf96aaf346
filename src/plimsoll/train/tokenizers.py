"""All roles read the tokens that the actor's tokenizer makes, so a role of another tokenizer would
read another text, and nothing would show it."""

from __future__ import annotations

import filecmp
from collections.abc import Iterable
from pathlib import Path

from plimsoll.config.model import ModelConfig
from plimsoll.errors import ConfigError
from plimsoll.model.checks import read_model_config
from plimsoll.model.load import load_tokenizer
from plimsoll.spec.model_files import has_tokenizer
from plimsoll.spec.roles import Role


def check_tokenizers(actor: ModelConfig, others: Iterable[Role]) -> None:
    """Hold the other roles' tokenizers and embeddings against the actor's tokenizer.

    A teacher must have one that is the same, and a probability for every row of the actor's head.
    Of a local directory without a tokenizer, and of a name on the hub, which may have none, only
    the embedding is looked at.

    Raises:
        ConfigError: a token is not the same text for both, or has no row in the role's embedding.
    """
    for role in others:
        if Path(role.model.path) == Path(actor.path):
            continue
        if role.name == "teacher":
            _check_head(role.model, actor)
        if role.name == "teacher" or has_tokenizer(role.model.path):
            _check_texts(role, actor)
        _check_rows(role, actor)


def _check_head(teacher: ModelConfig, actor: ModelConfig) -> None:
    teacher_rows, rows = _rows(teacher), _rows(actor)
    if teacher_rows < rows:
        raise ConfigError(
            f"teacher.model.path is {teacher.path!r}, whose vocabulary is {teacher_rows}, and the "
            f"actor's ({actor.path!r}) is {rows}: the teacher has no probability for every token. "
            f"Take a teacher of the actor's family"
        )


def _check_texts(role: Role, actor: ModelConfig) -> None:
    """The actor's tokens must all be the role's; a teacher gives a probability to its others too,
    so it may have none."""
    model = role.model
    mine, theirs = (Path(one.path) / "tokenizer.json" for one in (model, actor))
    if mine.is_file() and theirs.is_file() and filecmp.cmp(mine, theirs, shallow=False):
        return
    asked, known = _vocabulary(actor).items(), _vocabulary(model).items()
    differing = asked ^ known if role.name == "teacher" else asked - known
    if differing:
        text, token = min(differing, key=lambda entry: entry[1])
        count = len(differing)
        entries = "1 entry differs" if count == 1 else f"{count:,} entries differ"
        raise ConfigError(
            f"{role.key}.model.path is {model.path!r}, whose tokenizer is not that of the "
            f"actor ({actor.path!r}): {entries}, the first of them token "
            f"{token} ({text!r}). The {role.name} reads the actor's tokens, and would take them "
            f"for other text: take a model of the actor's family, or, where both mean the same, "
            f"put the actor's tokenizer into its directory"
        )


def _check_rows(role: Role, actor: ModelConfig) -> None:
    model = role.model
    rows, most = _rows(model), _rows(actor)
    if rows >= most:
        return
    text, token = max(_vocabulary(actor).items(), key=lambda entry: entry[1])
    if rows <= token < most:
        raise ConfigError(
            f"{role.key}.model.path is {model.path!r}, whose vocabulary is {rows}, and the "
            f"actor's tokenizer ({actor.path!r}) has the token {token} ({text!r}): take a model "
            f"of the actor's family, or enlarge this one with `resize_token_embeddings` of "
            f"transformers"
        )


def _vocabulary(model: ModelConfig) -> dict[str, int]:
    entries: dict[str, int] = load_tokenizer(model.path, model.trust_remote_code).get_vocab()
    return entries


def _rows(model: ModelConfig) -> int:
    settings = read_model_config(model.path, model.trust_remote_code)
    return int(settings.get_text_config().vocab_size)
