"""The rules of a plan besides memory: what cannot work here, with the reason and the way out.

They are about models (lengths, vocabularies, adapters' targets, attention), about ranks, nodes and
cards, about engines and kernels on them, and about this machine. docs/rules.md lists their codes.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.engine import EXPERTS, AdapterConfig, FrozenRole, TrainedRole
from plimsoll.config.problems import Problem, Severity, find
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.machine.local_host import LocalHost
from plimsoll.machine.versions import (
    FOR_TRITON,
    LIGER,
    cards_have_liger,
    how_to_install,
    installed_version,
    system_tools,
)
from plimsoll.memory.contents.contents import PlannedJob
from plimsoll.model.price.form import EMBEDDINGS
from plimsoll.model.price.layer import DOWN
from plimsoll.resolve.decisions import against_varlen
from plimsoll.resolve.engine_rules import trainer_rules, trainers_of
from plimsoll.resolve.rules.machine import local_host_rules
from plimsoll.run.numbers import plural
from plimsoll.sampler.price import rollout_price
from plimsoll.shapes.families import ROUTED_FAMILIES
from plimsoll.shapes.known_models import has_other_parts
from plimsoll.shapes.shape import ModelShape

_ALL_LINEAR = "all-linear"
_MLP = {"gate_proj", "up_proj", "down_proj"}
_RENAMED_EXPERTS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_moe")
"""Families whose experts had the names of _MLP in transformers 4, by which PEFT still finds them.

See peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe.
"""


def positions(job: PlannedJob) -> Iterator[Problem]:
    """Refuse roles whose longest sequence has more tokens than the model has positions.

    In a family that the plan does not know, max_position_embeddings may be no such limit.
    """
    for role, shape in job.shapes.items():
        longest, written = job.spec.longest_sequence(held_out=job.spec.roles[role].sends)
        if longest > shape.positions and shape.origin == "described":
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


_ESTIMATES = {
    "counted": "the parameters are counted in the model that transformers builds. Activations are "
    "estimated: most often within 10 %, but not for layers of another kind (linear attention)",
    "guessed": "transformers cannot build it, so that it counts as a Llama of the sizes in its "
    "config.json. The plan is coarse, and does not keep a run from starting",
}
"""Why the plan of a model is an estimate, by the origin of its shape."""


def families(job: PlannedJob) -> Iterator[Problem]:
    """Warn of models whose family the plan does not know, and say how it estimates them."""
    for role, shape in job.shapes.items():
        if why := _ESTIMATES.get(shape.origin):
            what = f"the plan does not know the {role}'s family, {shape.family} ({shape.name})"
            fix = "some memory left free, or an entry for the family in shapes/families.json"
            yield Problem("model-family", "warning", what, why, fix)


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
            severity: Severity = "error" if job.spec.roles[role].teaches else "warning"
            yield Problem("vocabulary", severity, what, why, fix)


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
        for target in adapter.targets if trained.adapter and shape.origin != "guessed" else ():
            if obstacle := _against_target(shape, target):
                what = f"{role}.adapter.targets: {target} is nothing of {shape.name} that can have "
                what += "an adapter"
                names = (*shape.adapter_targets, EXPERTS)
                fit = [name for name in names if not _against_target(shape, name)]
                every = "" if _against_target(shape, _ALL_LINEAR) else "; or all-linear"
                fix = f"some of {', '.join(fit)}{every}"
                yield Problem("adapter-targets", "error", what, obstacle, fix)


def frozen_routers(job: PlannedJob) -> Iterator[Problem]:
    """Refuse `freeze: router` for a model without experts."""
    for role, trained in job.spec.trained.items():
        shape = job.shapes[role]
        if trained.freeze == "router" and not shape.experts and shape.origin != "guessed":
            what = f"{role}.freeze is router, and {shape.name} has no router"
            why = "every token passes all its weights: it is no mixture of experts"
            fix = f"leave {role}.freeze out, or take a mixture of experts as {role}.model.path"
            yield Problem("no-router", "error", what, why, fix)


def tiled_mlps(job: PlannedJob) -> Iterator[Problem]:
    """Refuse `mlp_tile` for a model all of whose MLPs are routed experts."""
    for role, model in job.spec.models.items():
        shape = job.shapes[role]
        dense = sum(one.count for one in shape.linears if one.stacked == 1 and one.name in DOWN)
        if model.mlp_tile is not None and shape.experts and not dense:
            what = f"{role}.model.mlp_tile is {model.mlp_tile}, and all MLPs of {shape.name} are "
            what += "routed experts"
            why = "experts are not tiled: their rows are as many as tokens choose them"
            fix = f"leave {role}.model.mlp_tile out"
            yield Problem("no-tiled-mlp", "error", what, why, fix)


def sampled_routing(job: PlannedJob) -> Iterator[Problem]:
    """Refuse `rollout.routing: sampled` for a model whose experts the trainer cannot choose."""
    sampling, shape = job.spec.sampling, job.policy
    if sampling is None or sampling.rollout.routing == "live" or shape.family in ROUTED_FAMILIES:
        return
    what = f"rollout.routing is sampled, and the actor is {shape.name} ({shape.family})"
    why = "how its router weights the experts of a token is not known"
    if not shape.experts:
        why = "it has no experts: nothing is routed"
    fix = f"rollout.routing: live, or a model of {', '.join(ROUTED_FAMILIES)}"
    yield Problem("sampled-routing", "error", what, why, fix)


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
    if target == EXPERTS:
        return "" if shape.expert_stacks else "its MLPs are no mixture of experts"
    if any(linear.name == target for linear in shape.linears):
        return (
            f"transformers keeps the {target} of all {shape.experts} experts of a layer in one "
            f"tensor, which is no nn.Linear; `{EXPERTS}` stands for all of them"
        )
    return "no linear layer of the decoder has this name (the last part of the module's)"


def experts_left_out(job: PlannedJob) -> Iterator[Problem]:
    """Warn of `all-linear` where most weights are experts, which it leaves out."""
    for role, trained in job.spec.trained.items():
        shape, targets = job.shapes[role], trained.adapter.targets if trained.adapter else ()
        if shape.expert_stacks and _ALL_LINEAR in targets and EXPERTS not in targets:
            stacked = sum(linear.parameters for linear in shape.linears if linear.stacked > 1)
            what = f"{role}.adapter.targets: {_ALL_LINEAR} leaves out the experts of {shape.name}, "
            what += f"which have {stacked / shape.parameters:.0%} of its weights"
            why = "a layer's experts are stacked in two tensors, which are no linear layers"
            fix = f"{role}.adapter.targets: [{_ALL_LINEAR}, {EXPERTS}], or the names of layers"
            yield Problem("adapter-experts", "warning", what, why, fix)


def varlen(job: PlannedJob) -> Iterator[Problem]:
    """Refuse `model.attention: varlen` if it cannot compute the model."""
    for role, model in job.spec.models.items():
        if model.attention != "varlen":
            continue
        shape, dtype = job.shapes[role], model.dtype
        obstacles = [
            *against_varlen(job.device, job.capability, dtype, shape.softcapped, shape.head_dim)
        ]
        if shape.value_dim != shape.head_dim:
            wide = f"{shape.head_dim} and {shape.value_dim} wide"
            obstacles.append(f"keys and values must be equally wide, and the model's are {wide}")
        if text := "; ".join(obstacles):
            what = f"{job.key(role)}.model.attention is varlen, which cannot compute {shape.name}"
            why = f"of PyTorch's varlen_attn: {text}"
            fix = f"{job.key(role)}.model.attention: auto, or sdpa"
            yield Problem("varlen-attention", "error", what, why, fix)


def bfloat16_cards(job: PlannedJob) -> Iterator[Problem]:
    """Warn of bfloat16 on cards that are too old for it."""
    capability = job.capability
    models = job.spec.models
    narrow = [name for name, model in models.items() if model.dtype == "bfloat16"]
    if narrow and capability is not None and capability < BFLOAT16_UNITS:
        yield Problem(
            "bfloat16-card",
            "warning",
            f"{', '.join(narrow)}: model.dtype is bfloat16, and a card has compute capability "
            "{}.{}".format(*capability),
            "below 8.0 cards have no units for bfloat16: PyTorch computes in float32 and rounds, "
            "slower than float32 itself, and has no attention kernel for it: scores are written "
            "out, several times 4 bytes for each head, query and key of a sequence",
            "model.dtype: float32 for these roles, or cards from A100 or RTX 3090 on",
        )


def own_kernels(job: PlannedJob) -> Iterator[Problem]:
    """Warn of cards without Liger's kernels."""
    uses_own = any(model.kernels == "own" for model in job.spec.models.values())
    if job.device == "cuda" and uses_own and not cards_have_liger():
        yield Problem(
            "package-missing",
            "warning",
            f"{LIGER} is not installed, and the run is on GPUs",
            "norms and gated MLPs then run as chains of small operations, and rotary embeddings as "
            "transformers has them; Gemma's norms also keep several times the memory",
            f"`pip install {LIGER}`, which the extra `gpu` has",
        )


def triton(job: PlannedJob) -> Iterator[Problem]:
    """Refuse Liger's kernels if this machine lacks the tools with which Triton compiles them."""
    if (
        not any(model.kernels == "liger" for model in job.spec.models.values())
        or installed_version(LIGER) is None
    ):
        return
    tools = system_tools()
    if missing := [tool for tool in FOR_TRITON if tools[tool] is None]:
        yield Problem(
            "package-missing",
            "error",
            f"{LIGER} is installed, and this machine lacks {' and '.join(missing)}",
            "Triton compiles Liger's kernels with them: the first norm on a card would end the run",
            f"{how_to_install(missing)}; or `pip uninstall {LIGER}`, for our own slower functions",
        )


def offload(job: PlannedJob) -> Iterator[Problem]:
    """Warn of offload in a run on the CPU, where everything is in host memory already."""
    frozen = {job.key(name): role for name, role in job.spec.frozen.items()}
    roles: dict[str, TrainedRole | FrozenRole] = {**frozen, **job.spec.trained}
    keys = [
        f"{section}.{key}"
        for section, role in roles.items()
        for key in trainer_rules(role).offloaded(role)
    ]
    keys += [
        f"{name}.model.activation_offload"
        for name, role in job.spec.trained.items()
        if role.model.activation_offload == "cpu"
    ]
    if keys and job.device == "cpu":
        yield Problem(
            "offload-without-gpu",
            "warning",
            f"{', '.join(keys)}: cpu, and the run is on the CPU",
            "everything is in host memory already: offload frees nothing there, and keeps copies",
            "none instead of cpu",
        )


def rank_sleep(job: PlannedJob) -> Iterator[Problem]:
    """Refuse ranks that sleep beside engines that do not; warn of ranks that sleep on the CPU."""
    spec = job.spec
    if spec.engines is None or spec.rank_sleep == "none":
        return
    setting = f"cluster.rank_sleep is {spec.rank_sleep}"
    if job.device == "cpu":
        yield Problem(
            "offload-without-gpu",
            "warning",
            f"{setting}, and the run is on the CPU",
            "everything is in host memory already: sleep frees nothing there, and copies what "
            "sleeps in each step",
            "cluster.rank_sleep: none, unless a config for GPUs is tried",
        )
    elif not spec.engines.engine.sleeps:
        yield Problem(
            "sleep-not-shared",
            "error",
            f"{setting}, and engines stay awake while the ranks train",
            "the engines' memory is then beside all that the ranks have: no card gets less full, "
            "and each step copies what sleeps twice",
            "engines that sleep, such as rollout.vllm.sleep_level: 2, or cluster.rank_sleep: none",
        )


def trainers(job: PlannedJob) -> Iterator[Problem]:
    """Yield the problems that trainer engines report for the run on its device."""
    for rules in trainers_of(job.spec):
        yield from rules.plan(job.spec, job.device)


def engines(job: PlannedJob) -> Iterator[Problem]:
    """Yield the problems that the sampling engine reports for the run on its hardware."""
    if (site := job.engine_site) is not None:
        yield from rollout_price(site.sampler.rollout).plan(site)


def _streams(count: int, shards: int) -> str:
    """Return a number of streams as text: ranks, or groups of ranks that share packs."""
    return plural(count, "rank") if shards == 1 else f"{count} x {shards} ranks that share packs"


def idle_ranks(job: PlannedJob) -> Iterator[Problem]:
    """Warn of ranks without a sequence.

    Packing gives such a rank a filler, so the step works, and wastes ranks.
    """
    work, sampling = job.spec.workload, job.spec.sampling
    spec = job.spec
    ranks = max((spec.ranks_of(role) // spec.shards_of(role) for role in spec.trained), default=0)
    if work.units < ranks:
        what = "pair" if work.unit == "pair" else "sequence"
        yield Problem(
            "idle-ranks",
            "warning",
            f"an optimizer step has {plural(work.units, what)}, and there are "
            f"{_streams(ranks, spec.cluster.sequence_parallel)}",
            "a rank without any computes a filler that teaches nothing, while the others wait for "
            "it",
            f"more {work.count_key}, or fewer ranks",
        )
    shards = spec.cluster.reward_sequence_parallel or spec.cluster.sequence_parallel
    scorers = (spec.cluster.reward_ranks or 0) // shards
    if sampling is not None and sampling.sequences < scorers:
        yield Problem(
            "idle-ranks",
            "warning",
            f"a step has {plural(sampling.sequences, 'response')}, and there are "
            f"{_streams(scorers, shards)} that score them",
            "a rank without any computes a filler, while the others wait for it",
            "more batch.prompts or batch.responses, or fewer cluster.reward_ranks",
        )


def idle_cards(job: PlannedJob) -> Iterator[Problem]:
    """Warn of idle cards if `cluster.ranks` is at its default."""
    cluster, needed = job.spec.cluster, job.layout.cards_needed
    have = job.hardware.cards
    given = "ranks" in cluster.model_fields_set or bool(cluster.own_ranks)
    more = min(cluster.ranks + have - needed, job.spec.workload.units)
    if given or cluster.where == "local" or job.device == "cpu" or more <= cluster.ranks:
        return
    yield Problem(
        "idle-cards",
        "warning",
        f"the run uses {needed} of {have} GPUs",
        f"each rank has one card, and cluster.ranks is not given: it is {cluster.ranks}",
        f"cluster.ranks: {more}, or cluster.ranks: {cluster.ranks} to leave the other GPUs alone",
    )


def nodes(job: PlannedJob) -> Iterator[Problem]:
    """Warn of several nodes without a cluster to join."""
    cluster = job.spec.cluster
    if cluster.nodes > 1 and cluster.address is None:
        yield Problem(
            "nodes-without-cluster",
            "warning",
            f"the plan is for {cluster.nodes} nodes, and cluster.address is not given",
            "without it a run starts a Ray of its own, on its one machine",
            "start Ray on all nodes (`ray start --head`, then `ray start --address=...`), and give "
            "cluster.address: host:port of its head",
        )


PLAN_RULES = (
    *(positions, other_parts, families, vocabularies, adapter_targets, experts_left_out),
    *(frozen_routers, sampled_routing, tiled_mlps),
    *(varlen, engines),
    *(bfloat16_cards, own_kernels, offload),
    *(idle_ranks, idle_cards, nodes, trainers),
    rank_sleep,
)


def find_conflicts(job: PlannedJob, host: LocalHost | None) -> Iterator[Problem]:
    """Yield the problems that the rules find; `host` is None for a plan of other machines."""
    yield from find(PLAN_RULES, job)
    if host is not None:
        if (site := job.engine_site) is not None:  # this machine is the run's first node
            here = rollout_price(site.sampler.rollout).here
            yield from here(site, job.engine_cards, host.free_bytes)
        yield from local_host_rules(job.spec, host)
        if job.spec.cluster.address is None:  # other machines of a cluster cannot be checked here
            yield from triton(job)
