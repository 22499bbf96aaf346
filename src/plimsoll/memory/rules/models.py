"""Rules about models: lengths, vocabularies, adapters' targets, attention."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.engine.zero.sizes import EMBEDDINGS
from plimsoll.memory.contents.contents import Job
from plimsoll.memory.rules.problems import PlanProblem
from plimsoll.model.price.form import against_varlen
from plimsoll.shapes.known_models import has_other_parts
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.roles import RoleName

_ALL_LINEAR = "all-linear"
_MLP = {"gate_proj", "up_proj", "down_proj"}
_RENAMED_EXPERTS = ("glm4_moe", "qwen3_moe")
"""Families whose experts had these names in transformers 4, where PEFT goes on to find them
(peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe)."""


def model_rules(job: Job) -> Iterator[PlanProblem]:
    """Every role's model."""
    for name, shape in job.shapes.items():
        yield from _positions(job, name, shape)
    yield from _other_parts(job)
    yield from _vocabularies(job)
    yield from _targets(job)
    yield from _varlen(job)


def _positions(job: Job, role: RoleName, shape: ModelShape) -> Iterator[PlanProblem]:
    longest, written = job.spec.longest_of(role)
    if longest > shape.positions:
        yield PlanProblem(
            "sequence-over-positions",
            "error",
            f"a sequence of the {role} may be {longest:,} tokens long ({written})",
            f"{shape.name} has {shape.positions:,} positions (max_position_embeddings, or those "
            "before its longrope changes); what is beyond them it has never seen, or would change "
            "the rest of its pack",
            f"lower these lengths, or take a model with more positions as {job.key(role)}.model",
        )


def _other_parts(job: Job) -> Iterator[PlanProblem]:
    """A run refuses such models, when it reads their config.json (model/checks.py)."""
    for role, model in job.spec.models.items():
        if has_other_parts(model.path):
            yield PlanProblem(
                "text-decoder",
                "warning",
                f"the {role}'s model {model.path} has parts beside its text decoder, and the plan "
                "is for that decoder alone",
                "Plimsoll trains text decoders, and a run refuses the model as it is published",
                f"a text-only model, or as {job.key(role)}.model.path a directory with the text "
                "decoder saved by itself",
            )


def _vocabularies(job: Job) -> Iterator[PlanProblem]:
    """All roles read the tokens of the actor's tokenizer; a teacher gives each a probability."""
    actor = job.shapes["actor"]
    for role, shape in job.shapes.items():
        if shape.vocabulary < actor.vocabulary:
            yield PlanProblem(
                "vocabulary",
                "error" if role == "teacher" else "warning",
                f"the {role} ({shape.name}) has a vocabulary of {shape.vocabulary:,} and the actor "
                f"({actor.name}) one of {actor.vocabulary:,}",
                "it reads the tokens that the actor writes, and has no row for the last of them; "
                "that is harmless only where these are padding of the same tokenizer",
                f"a model with the actor's tokenizer as {job.key(role)}.model",
            )


def _targets(job: Job) -> Iterator[PlanProblem]:
    for role, trained in job.spec.trained.items():
        shape = job.shapes[role]
        for target in trained.adapter.targets if trained.adapter else ():
            if obstacle := _against_target(shape, target):
                yield PlanProblem(
                    "adapter-targets",
                    "error",
                    f"{role}.adapter.targets: {target} is nothing of {shape.name} that can have "
                    "an adapter",
                    obstacle,
                    _instead(shape),
                )


def _instead(shape: ModelShape) -> str:
    fit = [one for one in shape.adapter_targets if not _against_target(shape, one)]
    whole = "" if _against_target(shape, _ALL_LINEAR) else "; or all-linear"
    return f"some of {', '.join(fit)}{whole}"


def _against_target(shape: ModelShape, target: str) -> str:
    """Why a target cannot be; "" where it can."""
    if target == EMBEDDINGS:
        return "it is also the output head (tie_word_embeddings)" if shape.tied else ""
    mistaken = shape.family in _RENAMED_EXPERTS and _MLP & {*shape.adapter_targets}
    if mistaken and target in (_ALL_LINEAR, *_MLP):
        return (
            "PEFT would take it for the model's experts, which are stacked in one tensor, and in "
            "each forward write the update of all of them out"
        )
    if target in (_ALL_LINEAR, *shape.adapter_targets):
        return ""
    if any(linear.name == target for linear in shape.linears):
        return (
            f"transformers keeps the {target} of all {shape.experts} experts of a layer in one "
            "tensor, which is no nn.Linear: its weights would stay frozen"
        )
    return "no linear layer of the decoder has this name (the last part of the module's)"


def _varlen(job: Job) -> Iterator[PlanProblem]:
    """model.attention: varlen where it cannot be; auto takes sdpa there."""
    for role, model in job.spec.models.items():
        if model.attention != "varlen":
            continue
        shape, dtype = job.shapes[role], model.dtype
        obstacles = against_varlen(
            job.device, job.capability, dtype, shape.softcapped, shape.head_dim
        )
        if text := "; ".join(obstacles):
            yield PlanProblem(
                "varlen-attention",
                "error",
                f"{job.key(role)}.model.attention is varlen, which cannot compute {shape.name}",
                f"of PyTorch's varlen_attn: {text}",
                f"{job.key(role)}.model.attention: auto, or sdpa",
            )
