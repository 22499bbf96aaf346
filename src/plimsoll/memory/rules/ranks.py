"""Rules about ranks, nodes and cards, and about engines and kernels on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.problems import Problem
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.machine.tools import FOR_TRITON, how_to_install, system_tools
from plimsoll.machine.versions import LIGER, cards_have_liger, installed_version
from plimsoll.memory.contents.contents import PlannedJob
from plimsoll.resolve.engine_rules import trainer_rules, trainers_of
from plimsoll.run.numbers import plural
from plimsoll.sampler.price import rollout_price


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


def engines_here(job: PlannedJob, free_bytes: Sequence[int]) -> Iterator[Problem]:
    """Yield the problems that the sampling engine reports for the cards of this machine.

    Args:
        job: the run.
        free_bytes: free bytes of each card of this machine, which is the run's first node.
    """
    if (site := job.engine_site) is not None:
        yield from rollout_price(site.sampler.rollout).here(site, job.engine_cards, free_bytes)


def idle_ranks(job: PlannedJob) -> Iterator[Problem]:
    """Warn of ranks without a sequence.

    Packing gives such a rank a filler, so the step works, and wastes ranks.
    """
    work, sampling = job.spec.workload, job.spec.sampling
    ranks = max((job.spec.ranks_of(role) for role in job.spec.trained), default=0)
    if work.units < ranks:
        what = "pair" if work.unit == "pair" else "sequence"
        yield Problem(
            "idle-ranks",
            "warning",
            f"an optimizer step has {plural(work.units, what)}, and there are {ranks} ranks",
            "a rank without any computes a filler that teaches nothing, while the others wait for "
            "it",
            f"more {work.count_key}, or fewer ranks",
        )
    scorers = job.spec.cluster.reward_ranks or 0
    if sampling is not None and sampling.sequences < scorers:
        yield Problem(
            "idle-ranks",
            "warning",
            f"a step has {plural(sampling.sequences, 'response')}, and there are {scorers} ranks "
            "that score them",
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
