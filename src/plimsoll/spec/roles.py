"""The models of a run and what each does in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.model import ModelConfig

RoleName = str
"""Name of a role: its kind (`reward`), or kind and instance (`reward.helpful`) of several."""

KINDS = ("actor", "critic", "reference", "reward", "teacher")
"""The kinds of roles, in the order in which they are loaded."""


def load_order(name: RoleName) -> tuple[int, str]:
    """Return the key by which roles are sorted for loading."""
    return KINDS.index(name.partition(".")[0]), name


def is_role(name: str) -> bool:
    """Return whether a role may have this name."""
    return name.partition(".")[0] in KINDS


HeadKind = Literal["policy", "value", "states"]
"""The output for a token: log-probs over the vocabulary, one number, or its hidden states."""


@dataclass(frozen=True)
class Role:
    """A model with work to do in a run.

    Attributes:
        name: the role.
        settings: those of a role that learns, or of one that only scores.
        head: what it computes of a token.
        key: the config's key of the role.
        scores: whether it does a forward without gradients in each step.
        given: whether the config names it; a reference may be left to its default.
        early: whether it scores everything before the actor is loaded, and is gone then.
        without_adapter: whether it is the actor's model with the adapter switched off, and holds
            nothing of its own.
        begins: steps of the run before it learns.
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
        """The settings of a role that learns; None for one that only scores."""
        return self.settings if isinstance(self.settings, TrainedRole) else None

    @property
    def frozen(self) -> FrozenRole | None:
        """The settings of a role that only scores, with weights of its own; else None."""
        if self.without_adapter or not isinstance(self.settings, FrozenRole):
            return None
        return self.settings

    @property
    def model(self) -> ModelConfig:
        """The model of the role."""
        return self.settings.model


def learner(
    name: Literal["actor", "critic"],
    settings: TrainedRole,
    head: HeadKind,
    *,
    scores: bool = False,
    begins: int = 0,
) -> Role:
    """Return a role that learns."""
    return Role(name, settings, head, name, scores, begins=begins)


def reference_of(given: FrozenRole | None, actor: TrainedRole, *, precompute: bool = False) -> Role:
    """Return the role that the actor is compared with.

    Its model is the one that the config names, else the actor's first weights. For an actor with
    an adapter these are its own with the adapter switched off, unless the reference scores before
    there is an actor.
    """
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
    """Return the role of the reward model whose part of the reward has this name."""
    return "reward" if part == "reward_model" else f"reward.{part}"
