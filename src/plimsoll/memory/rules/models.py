"""Rules about models: lengths, vocabularies, adapters' targets, attention."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.engine import AdapterConfig
from plimsoll.config.problems import Problem
from plimsoll.memory.contents.contents import PlannedJob
from plimsoll.model.price.form import EMBEDDINGS
from plimsoll.resolve.decisions import against_varlen
from plimsoll.shapes.known_models import has_other_parts
from plimsoll.shapes.shape import ModelShape

_ALL_LINEAR = "all-linear"
_MLP = {"gate_proj", "up_proj", "down_proj"}
_RENAMED_EXPERTS = ("glm4_moe", "qwen3_moe")
"""Families whose experts had the names of _MLP in transformers 4, by which PEFT still finds them.

See peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe.
"""


def positions(job: PlannedJob) -> Iterator[Problem]:
    """Refuse roles whose longest sequence has more tokens than the model has positions."""
    for role, shape in job.shapes.items():
        longest, written = job.spec.longest_of(role)
        if longest > shape.positions:
            what = f"a sequence of the {role} may be {longest:,} tokens long ({written})"
            why = f"{shape.name} has {shape.positions:,} positions (max_position_embeddings, or "
            why += "those before its longrope changes); what is beyond them it has never seen, or "
            why += "would change the rest of its pack"
            fix = f"lower these lengths, or take a model with more positions as {job.key(role)}"
            fix += ".model"
            yield Problem("sequence-over-positions", "error", what, why, fix)


def other_parts(job: PlannedJob) -> Iterator[Problem]:
    """Warn of models with parts beside their text decoder.

    A run refuses such models when it reads their config.json (model/checks.py).
    """
    for role, model in job.spec.models.items():
        if has_other_parts(model.path):
            what = f"the {role}'s model {model.path} has parts beside its text decoder, and the "
            what += "plan is for that decoder alone"
            why = "Plimsoll trains text decoders, and a run refuses the model as it is published"
            fix = f"a text-only model, or as {job.key(role)}.model.path a directory with the text "
            fix += "decoder saved by itself"
            yield Problem("text-decoder", "warning", what, why, fix)


def vocabularies(job: PlannedJob) -> Iterator[Problem]:
    """Report roles with a smaller vocabulary than the actor's.

    All roles read the tokens of the actor's tokenizer. A teacher gives each token a probability.
    """
    actor = job.policy
    for role, shape in job.shapes.items():
        if shape.vocabulary < actor.vocabulary:
            what = f"the {role} ({shape.name}) has a vocabulary of {shape.vocabulary:,} and the "
            what += f"actor ({actor.name}) one of {actor.vocabulary:,}"
            why = "it reads the tokens that the actor writes, and has no row for the last of them; "
            why += "that is harmless only where these are padding of the same tokenizer"
            fix = f"a model with the actor's tokenizer as {job.key(role)}.model"
            yield Problem("vocabulary", "error" if role == "teacher" else "warning", what, why, fix)


def adapter_targets(job: PlannedJob) -> Iterator[Problem]:
    """Refuse targets of adapters that the model does not have, or that cannot have an adapter."""
    for role, trained in job.spec.trained.items():
        shape, adapter = job.shapes[role], trained.adapter or AdapterConfig()
        whole = {*adapter.modules_to_save}
        against = dict.fromkeys(adapter.targets, "it is one of its targets")
        if job.spec.roles[role].head == "value":
            against["lm_head"] = "the head gives one number a token, and is trained whole anyway"
        for module in whole & against.keys():
            what = f"{role}.adapter.modules_to_save: {module} cannot be trained whole beside it"
            yield Problem("adapter-targets", "error", what, against[module], f"no {module} there")
        for target in adapter.targets if trained.adapter else ():
            if obstacle := _against_target(shape, target):
                what = f"{role}.adapter.targets: {target} is nothing of {shape.name} that can have "
                what += "an adapter"
                fix = _instead(shape)
                yield Problem("adapter-targets", "error", what, obstacle, fix)


def _instead(shape: ModelShape) -> str:
    fit = [target for target in shape.adapter_targets if not _against_target(shape, target)]
    whole = "" if _against_target(shape, _ALL_LINEAR) else "; or all-linear"
    return f"some of {', '.join(fit)}{whole}"


def _against_target(shape: ModelShape, target: str) -> str:
    """Return why a target cannot have an adapter; "" if it can."""
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


def varlen(job: PlannedJob) -> Iterator[Problem]:
    """Refuse `model.attention: varlen` if it cannot compute the model."""
    for role, model in job.spec.models.items():
        if model.attention != "varlen":
            continue
        shape, dtype = job.shapes[role], model.dtype
        obstacles = against_varlen(
            job.device, job.capability, dtype, shape.softcapped, shape.head_dim
        )
        if text := "; ".join(obstacles):
            what = f"{job.key(role)}.model.attention is varlen, which cannot compute {shape.name}"
            why = f"of PyTorch's varlen_attn: {text}"
            fix = f"{job.key(role)}.model.attention: auto, or sdpa"
            yield Problem("varlen-attention", "error", what, why, fix)
