"""The roles that jobs declare: what each takes part in."""

from __future__ import annotations

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.rl import REWARD_MODEL
from plimsoll.resolve.engine_rules import trainer_rules
from plimsoll.resolve.roles import HeadKind, Role

CRITIC, REFERENCE, TEACHER = "critic", "reference", "teacher"


def actor(settings: TrainedRole, head: HeadKind, *, scores: bool = False, begins: int = 0) -> Role:
    """Return the role that a job is there for: the model that learns, and is written at the end."""
    return Role(
        "actor",
        settings,
        head,
        "actor",
        trains="train_actor",
        sends=True,
        scores=scores,
        column="old_L",
        begins=begins,
    )


def critic(settings: TrainedRole) -> Role:
    """Return the role that learns to predict what the tokens' rewards will add up to."""
    return Role(
        CRITIC,
        settings,
        "value",
        CRITIC,
        trains="train_critic",
        group="critic",
        scores=True,
        column="values_L",
    )


def reference(given: FrozenRole | None, actor: TrainedRole, *, precompute: bool = False) -> Role:
    """Return the role with which the actor is compared.

    Its model is the config's `reference`, or else the actor's initial weights, divided over the
    ranks as the actor's are. If the actor has an
    adapter, these are the actor's weights with the adapter switched off, except with modules that
    are trained whole, and with `precompute`: then the reference scores all rows before the actor is
    loaded.
    """
    divided = trainer_rules(actor).measuring(actor)
    adapter = actor.adapter
    shared = given is None and adapter is not None and not (precompute or adapter.modules_to_save)
    return Role(
        REFERENCE,
        given or FrozenRole(model=actor.model).with_engine(divided),
        "policy",
        REFERENCE,
        scores=True,
        column="reference_L",
        given=given is not None,
        early=precompute,
        without_adapter=shared,
    )


def teacher(settings: FrozenRole, head: HeadKind) -> Role:
    """Return the role whose distributions the actor learns."""
    column = "teacher_L" if head == "policy" else ""
    return Role(TEACHER, settings, head, TEACHER, scores=True, column=column, teaches=True)


def reward_model(part: str, settings: FrozenRole) -> Role:
    """Return the role of a model that scores responses: it gives this part of the reward."""
    is_only = part == REWARD_MODEL
    name, key = ("reward", part) if is_only else (f"reward.{part}", f"reward_models.{part}")
    return Role(name, settings, "value", f"{key}.role", group="reward", scores=True, part=part)
