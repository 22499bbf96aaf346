"""Load roles on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.config.engine import FrozenRole
from plimsoll.data.stored import learned_tokens
from plimsoll.model.load import load_tokenizer
from plimsoll.records import Row
from plimsoll.resolve.engine_rules import trainer_rules
from plimsoll.resolve.job import ConfigT
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.train.from_data import ItemT, RowT, Work
from plimsoll.trainer.worker import Worker


def load_role(cluster: Cluster, spec: RunSpec[Any], name: RoleName) -> None:
    """Load a role on all ranks of its group.

    A role may be another one with its adapter switched off. Then no second model is loaded, and
    the other must have been loaded before.
    """
    if spec.roles[name].without_adapter:
        cluster.all(Worker.score_without_adapter, spec.sender.name, name)
    else:
        _load(cluster, spec, name, spec.roles[name].settings)


def load_measured(cluster: Cluster, spec: RunSpec[Any], name: RoleName) -> None:
    """Load a role for an evaluation without training, as a frozen model.

    If training would divide the actor's weights among the ranks, they are divided here too.
    """
    settings = spec.roles[name].settings
    if not isinstance(settings, FrozenRole):
        divided = trainer_rules(spec.actor).measuring(spec.actor)
        settings = FrozenRole(model=spec.actor.model).with_engine(divided)
    _load(cluster, spec, name, settings)


def _load(cluster: Cluster, spec: RunSpec[Any], name: RoleName, settings: Any) -> None:
    role, sampling = spec.roles[name], spec.sampling
    temperature = 1.0 if sampling is None else sampling.rollout.sampling.temperature
    arguments = name, settings, temperature, spec.run.seed, role.head
    group_of(cluster, role).all(Worker.load_model, *arguments)


def load_roles(work: Work[ConfigT, ItemT]) -> None:
    """Load all of a run's roles, one after the other."""
    with work.session.phase("load", work.cluster):
        for name in work.spec.roles:
            load_role(work.cluster, work.spec, name)


def load_scorer(work: Work[ConfigT, RowT]) -> None:
    """Load the actor as a model that scores, and set the padding token for its config.

    The loss mask of each training row marks the tokens at which scores are read.
    """
    with work.session.phase("load", work.cluster):
        name = work.spec.sender.name
        load_role(work.cluster, work.spec, name)
        model, rows = work.spec.actor.model, work.data.train
        padding = padding_token(load_tokenizer(model.path, model.trust_remote_code), rows)
        work.cluster.all(Worker.set_padding, name, padding)
        if padding is None:
            work.session.progress.note(
                "the tokenizer has no padding token, or scores are read at it: transformers will "
                "score one sequence at a time with the saved model"
            )


def padding_token(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> int | None:
    """Return the token that sequences may be padded with; None if no token is safe.

    transformers' sequence classification reads the score at the last token that is not padding.
    Many tokenizers pad with the token that ends a turn. If scores are read at that token,
    transformers would skip it as padding and read the score one token too early.
    """
    token = tokenizer.pad_token_id
    if token is None or any(token in read_at for read_at in learned_tokens(rows)):
        return None
    return int(token)
