"""The roles that jobs declare: what each takes part in."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.rl import REWARD_MODEL, scoring_key
from plimsoll.resolve.engine_rules import trainer_rules
from plimsoll.resolve.roles import HeadKind, Role

CRITIC, REFERENCE, TEACHER = "critic", "reference", "teacher"


def actor(settings: TrainedRole, head: HeadKind, *, scores: bool = False, begins: int = 0) -> Role:
    """Return the role that a job is there for: the model that learns, and is written at the end."""
    role = Role("actor", settings, head, "actor", trains="train_actor", sends=True)
    return replace(role, column="trainer_logprobs", scores=scores, begins=begins)


def critic(settings: TrainedRole) -> Role:
    """Return the role that learns to predict what the tokens' rewards will add up to."""
    role = Role(CRITIC, settings, "value", CRITIC, trains="train_critic", column="values")
    return replace(role, group="critic")


def reference(given: FrozenRole | None, actor: TrainedRole, *, precompute: bool = False) -> Role:
    """Return the role with which the actor is compared.

    Its model is the config's `reference`, or else the actor's initial weights, divided over the
    ranks as the actor's are. If the actor has an adapter, these are the actor's weights with the
    adapter switched off, except with modules that are trained whole, and with `precompute`: then
    the reference scores all rows before the actor is loaded.
    """
    settings = given or FrozenRole(model=actor.model).with_engine(
        trainer_rules(actor).measuring(actor)
    )
    role = Role(REFERENCE, settings, "policy", REFERENCE, column="reference_logprobs")
    role = replace(role, early=precompute)
    if given is not None:
        return role
    is_adapted = actor.adapter is not None and not actor.adapter.modules_to_save
    return replace(role, given=False, without_adapter=is_adapted and not precompute)


def teacher(settings: FrozenRole, head: HeadKind) -> Role:
    """Return the role whose distributions the actor learns."""
    column = "teacher_logprobs" if head == "policy" else ""
    return Role(TEACHER, settings, head, TEACHER, column=column, teaches=True)


def reward_model(part: str, settings: FrozenRole) -> Role:
    """Return the role of a model that scores responses: it gives this part of the reward."""
    name, key = "reward" if part == REWARD_MODEL else f"reward.{part}", scoring_key(part)
    return Role(name, settings, "value", f"{key}.role", group="reward", part=part)
