"""The models of a run and what each does in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.model import ModelConfig

RoleName = str
"""Of a kind, or of one of several of a kind after a dot, such as `reward.helpful`."""

KINDS = ("actor", "critic", "reference", "reward", "teacher")
"""In the order in which they are loaded."""


def load_order(name: RoleName) -> tuple[int, str]:
    """Roles are loaded in the order of this key."""
    return KINDS.index(name.partition(".")[0]), name


def is_role(name: str) -> bool:
    """Whether a role may have this name."""
    return name.partition(".")[0] in KINDS


HeadKind = Literal["policy", "value", "states"]
"""What is computed of a token: log-probs over the vocabulary, one number, or its hidden states."""


@dataclass(frozen=True)
class Role:
    """A model with work to do.

    key: the config's key of it. settings: of a role that learns, or of one that only scores.
    scores: whether a step has it do a forward without gradients. given: whether the config names
    it; a reference may be left to its default. early: it scores everything before the actor is
    loaded, and is gone then. without_adapter: it is no model of its own but the actor's with the
    adapter switched off, and holds nothing. begins: steps of the run before it learns.
    """

    name: RoleName
    settings: TrainedRole | FrozenRole
    head: HeadKind
    key: str
    scores: bool = False
    given: bool = True
    early: bool = False
    without_adapter: bool = False
    begins: int = 0

    @property
    def trained(self) -> TrainedRole | None:
        """The settings of a role that learns; None of one that only scores."""
        return self.settings if isinstance(self.settings, TrainedRole) else None

    @property
    def frozen(self) -> FrozenRole | None:
        """The settings of a role that only scores, with weights of its own; else None."""
        if self.without_adapter or not isinstance(self.settings, FrozenRole):
            return None
        return self.settings

    @property
    def model(self) -> ModelConfig:
        return self.settings.model


def learner(
    name: Literal["actor", "critic"],
    settings: TrainedRole,
    head: HeadKind,
    *,
    scores: bool = False,
    begins: int = 0,
) -> Role:
    """A role that learns."""
    return Role(name, settings, head, name, scores, begins=begins)


def reference_of(given: FrozenRole | None, actor: TrainedRole, *, precompute: bool = False) -> Role:
    """What the actor is compared with: the model that the config names, else the actor's first
    weights. Those of an actor with an adapter are its own with the adapter switched off, unless the
    reference scores before there is an actor."""
    settings = given or FrozenRole.model_validate({"model": actor.model, actor.engine_name: {}})
    shared = given is None and actor.adapter is not None and not precompute
    return Role(
        "reference",
        settings,
        "policy",
        "reference",
        scores=True,
        given=given is not None,
        early=precompute,
        without_adapter=shared,
    )


def scoring_role(part: str) -> RoleName:
    """The role of the reward model whose part of the reward has this name."""
    return "reward" if part == "reward_model" else f"reward.{part}"
