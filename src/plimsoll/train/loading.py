"""Load roles on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from plimsoll.cluster.protocol import Cluster, ranks_of
from plimsoll.config.engine import FrozenRole
from plimsoll.engine.worker import Worker
from plimsoll.model.load import load_tokenizer
from plimsoll.records import Sample, samples_of
from plimsoll.spec.engine_rules import trainer_rules
from plimsoll.spec.job import ConfigT
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.from_data import ItemT, RowT, Work


def load_role(cluster: Cluster, spec: RunSpec[Any], name: RoleName) -> None:
    """Load a role on all ranks of its group.

    A reference that is the actor with its adapter switched off needs no second model: the actor
    must have been loaded.
    """
    role = spec.roles[name]
    if role.without_adapter:
        cluster.all(Worker.score_without_adapter, "actor", name)
        return
    _load(cluster, spec, name, role.settings)


def load_measured(cluster: Cluster, spec: RunSpec[Any], name: RoleName) -> None:
    """Load a role that is only measured, or measured against.

    The actor's weights are divided over the ranks if they are in training.
    """
    settings = spec.roles[name].settings
    if not isinstance(settings, FrozenRole):
        divided = trainer_rules(spec.actor).measuring(spec.actor)
        settings = FrozenRole(model=spec.actor.model).with_engine(divided)
    _load(cluster, spec, name, settings)


def _load(cluster: Cluster, spec: RunSpec[Any], name: RoleName, settings: Any) -> None:
    group, seed = ranks_of(cluster, name), spec.run.seed
    match spec.roles[name].head:
        case "policy":
            sampling = spec.sampling
            temperature = 1.0 if sampling is None else sampling.rollout.sampling.temperature
            group.all(Worker.load_policy, name, settings, temperature, seed)
        case "value":
            group.all(Worker.load_value, name, settings, seed)
        case "states":
            group.all(Worker.load_teacher, settings)


def load_roles(work: Work[ConfigT, ItemT]) -> None:
    """Load all of a run's roles, one after the other."""
    with work.session.phase("load", work.cluster):
        for name in work.spec.roles:
            load_role(work.cluster, work.spec, name)


def load_scorer(work: Work[ConfigT, RowT]) -> None:
    """Load the model that learns to score. Its rows are marked where scores are read."""
    with work.session.phase("load", work.cluster):
        load_role(work.cluster, work.spec, "actor")
        model, samples = work.spec.actor.model, samples_of(work.data.train)
        padding = padding_token(load_tokenizer(model.path, model.trust_remote_code), samples)
        work.cluster.all(Worker.set_padding, "actor", padding)
        if padding is None:
            work.session.progress.note(
                "the tokenizer has no padding token, or scores are read at it: transformers will "
                "score one sequence at a time with the saved model"
            )


def padding_token(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> int | None:
    """Return the token that sequences may be padded with; None if there is no safe one.

    transformers' sequence classification reads the last token that is not the padding. If a score
    is read at the padding token (many tokenizers pad with the token that ends a turn), it would be
    read one token too early.
    """
    read_at = {int(token) for sample in samples for token in sample.tokens[sample.loss_mask]}
    token = tokenizer.pad_token_id
    return None if token is None or token in read_at else int(token)
