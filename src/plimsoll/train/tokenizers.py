"""Check that every token of the actor's tokenizer means the same text for all other roles.

A role with another tokenizer would read another text, and no metric would show it.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterable
from pathlib import Path

from plimsoll.config.engine import ModelConfig
from plimsoll.errors import ConfigError
from plimsoll.model.checks import read_model_config
from plimsoll.model.load import load_tokenizer
from plimsoll.resolve.model_files import has_tokenizer
from plimsoll.resolve.roles import Role


def check_tokenizers(actor: ModelConfig, others: Iterable[Role]) -> None:
    """Check the tokenizers and embeddings of the other roles against the actor's tokenizer.

    A teacher must have the same tokenizer as the actor, and at least as large a vocabulary. For
    other roles without a tokenizer in a local directory (such as a name on the hub), only the size
    of the embedding is checked.

    Raises:
        ConfigError: a token means another text for a role, or has no row in its embedding.
    """
    for role in others:
        if Path(role.model.path) == Path(actor.path):
            continue
        if role.teaches:
            _check_head(role, actor)
        if role.teaches or has_tokenizer(role.model.path):
            _check_texts(role, actor)
        _check_embedding(role, actor)


def check_templates(actor: ModelConfig, others: Iterable[Role]) -> None:
    """Raise ConfigError if a teacher knows another form of conversations than the actor writes.

    The teacher would take the marks of turns for surprising text, and no learning would close that
    gap.
    """
    for role in others:
        if not role.teaches or Path(role.model.path) == Path(actor.path):
            continue
        its, own = (
            load_tokenizer(model.path, model.trust_remote_code).chat_template
            for model in (role.model, actor)
        )
        if its is not None and its != own:
            raise ConfigError(
                f"The chat template of {role.key}.model.path ({role.model.path!r}) is not that of "
                f"the actor ({actor.path!r}), by which prompts are written: give "
                "data.chat_template the one that both shall read, which is mostly the "
                f"{role.name}'s"
            )


def _check_head(role: Role, actor: ModelConfig) -> None:
    its_rows, rows = _vocabulary_size(role.model), _vocabulary_size(actor)
    if its_rows < rows:
        raise ConfigError(
            f"{role.key}.model.path is {role.model.path!r}, whose vocabulary is {its_rows}, and "
            f"the actor's ({actor.path!r}) is {rows}: the {role.name} has no probability for every "
            f"token. Take a {role.name} of the actor's family"
        )


def _check_texts(role: Role, actor: ModelConfig) -> None:
    """Raise ConfigError unless the role's tokenizer has all tokens of the actor's.

    A teacher's tokenizer may have no further tokens, for it gives each of them a probability.
    """
    model = role.model
    role_file, actor_file = (Path(m.path) / "tokenizer.json" for m in (model, actor))
    exist = role_file.is_file() and actor_file.is_file()
    if exist and filecmp.cmp(role_file, actor_file, shallow=False):
        return
    actor_tokens, role_tokens = _vocabulary(actor).items(), _vocabulary(model).items()
    differing = actor_tokens ^ role_tokens if role.teaches else actor_tokens - role_tokens
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


def _check_embedding(role: Role, actor: ModelConfig) -> None:
    model = role.model
    rows, actor_rows = _vocabulary_size(model), _vocabulary_size(actor)
    if rows >= actor_rows:
        return
    text, token = max(_vocabulary(actor).items(), key=lambda entry: entry[1])
    if rows <= token < actor_rows:
        raise ConfigError(
            f"{role.key}.model.path is {model.path!r}, whose vocabulary is {rows}, and the "
            f"actor's tokenizer ({actor.path!r}) has the token {token} ({text!r}): take a model "
            f"of the actor's family, or enlarge this one with `resize_token_embeddings` of "
            f"transformers"
        )


def _vocabulary(model: ModelConfig) -> dict[str, int]:
    entries: dict[str, int] = load_tokenizer(model.path, model.trust_remote_code).get_vocab()
    return entries


def _vocabulary_size(model: ModelConfig) -> int:
    settings = read_model_config(model.path, model.trust_remote_code)
    return int(settings.get_text_config().vocab_size)
