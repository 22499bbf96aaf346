"""The roles of a run: each is a model with its work, such as learning or scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll.config.engine import FrozenRole, ModelConfig, TrainedRole
from plimsoll.resolve.engine_rules import trainer_rules

RoleName = str
"""Name of a role: its kind (`reward`), or kind and instance (`reward.helpful`) of several."""

KINDS = ("actor", "critic", "reference", "reward", "teacher")
"""The kinds of roles, in the order in which they are loaded."""


def role_kind(name: RoleName) -> str:
    """Return the kind of a role, such as `reward` for `reward.helpful`."""
    return name.partition(".")[0]


def load_order(name: RoleName) -> tuple[int, str]:
    """Return the key by which roles are sorted for loading."""
    return KINDS.index(role_kind(name)), name


def is_role(name: str) -> bool:
    """Return whether a role may have this name."""
    return role_kind(name) in KINDS


HeadKind = Literal["policy", "value", "states"]
"""The output for a token: log-probs (policy), one number (value), or hidden states (states)."""


@dataclass(frozen=True)
class Role:
    """A model with work to do in a run.

    Attributes:
        name: the name of the role.
        settings: the settings of a role that learns, or of a role that only scores.
        head: the output for a token.
        key: the role's section in the config.
        scores: whether it does a forward pass without gradients in each step of the run.
        given: whether the config has its section; a reference may be left to its default.
        early: whether it scores all rows before the actor is loaded, and is removed then.
        without_adapter: whether it is the actor's model with the adapter switched off, so that it
            holds no weights.
        begins: the number of steps of the run before it learns.
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
        """The settings of a role that only scores and has its own weights; None for others."""
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
    """Return the reference role, with which the actor is compared.

    Its model is the config's `reference`, or else the actor's initial weights, divided over the
    ranks as the actor's are. If the actor has an
    adapter, these are the actor's weights with the adapter switched off, except with modules that
    are trained whole, and with `precompute`: then the reference scores all rows before the actor is
    loaded.
    """
    divided = trainer_rules(actor).measuring(actor)
    settings = given or FrozenRole(model=actor.model).with_engine(divided)
    adapter = actor.adapter
    shared = given is None and adapter is not None and not (precompute or adapter.modules_to_save)
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
    """Return the name of the role of a reward model, given the name of its part of the reward."""
    return "reward" if part == "reward_model" else f"reward.{part}"
