"""Rules about ranks, nodes and cards, and about what trained roles keep there and exchange."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.engine import ZeroConfig
from plimsoll.config.problems import Problem
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.machine.tools import FOR_TRITON, how_to_install, system_tools
from plimsoll.machine.versions import LIGER, cards_have_liger, installed_version
from plimsoll.memory.contents.contents import Job
from plimsoll.run.counting import counted


def bfloat16_cards(job: Job) -> Iterator[Problem]:
    """Cards that are older than it."""
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


def own_kernels(job: Job) -> Iterator[Problem]:
    """Cards without Liger's kernels."""
    if job.device == "cuda" and not cards_have_liger():
        yield Problem(
            "package-missing",
            "warning",
            f"{LIGER} is not installed, and the run is on GPUs",
            "norms and gated MLPs then run as chains of small operations, and rotary embeddings as "
            "transformers has them; Gemma's norms also keep several times the memory",
            f"`pip install {LIGER}`, which the extra `gpu` has",
        )


def triton(job: Job) -> Iterator[Problem]:
    """What Triton compiles Liger's kernels with, on the machine at hand."""
    if job.fused != "liger" or installed_version(LIGER) is None:
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


def offload(job: Job) -> Iterator[Problem]:
    """Offload where all is in host memory already."""
    asked = [
        f"{job.key(name)}.offload"
        for name, frozen in job.spec.frozen.items()
        if frozen.offload == "cpu"
    ]
    for name, trained in job.spec.trained.items():
        moved = {
            "parameter_offload": trained.zero.parameter_offload,
            "optimizer_offload": trained.zero.optimizer_offload,
        }
        asked += [f"{name}.zero.{key}" for key, where in moved.items() if where == "cpu"]
        if trained.model.activation_offload == "cpu":
            asked.append(f"{name}.model.activation_offload")
    if asked and job.device == "cpu":
        yield Problem(
            "offload-without-gpu",
            "warning",
            f"{', '.join(asked)}: cpu, and the run is on the CPU",
            "everything is in host memory already: offload frees nothing there, and keeps copies",
            "none instead of cpu",
        )


def idle_ranks(job: Job) -> Iterator[Problem]:
    """Packing gives a rank without a sequence a filler, so such a step works, and wastes ranks."""
    work = job.spec.workload
    ranks = max((job.spec.ranks_of(role) for role in job.spec.trained), default=0)
    if work.units >= ranks:
        return
    what = "pair" if work.unit == "pair" else "sequence"
    yield Problem(
        "idle-ranks",
        "warning",
        f"an optimizer step has {counted(work.units, what)}, and there are {ranks} ranks",
        "a rank without any computes a filler that teaches nothing, while the others wait for it",
        f"more {work.count_key}, or fewer ranks",
    )


def idle_cards(job: Job) -> Iterator[Problem]:
    """Cards that nobody asked to leave idle: cluster.ranks is at its default."""
    cluster, needed = job.spec.cluster, job.layout.cards_needed
    have = job.hardware.cards
    given = "ranks" in cluster.model_fields_set or cluster.critic_ranks is not None
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


def nodes(job: Job) -> Iterator[Problem]:
    """Several, without a cluster to join."""
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


LOST_BELOW = 2.0**-14
"""Half the distance of bfloat16 numbers about 0.02, the spread that transformers gives new weights
(`initializer_range`): AdamW moves a weight by about the learning rate, and what is less than that
half is rounded away."""


def lost_updates(job: Job) -> Iterator[Problem]:
    """States in bfloat16."""
    for name, role in job.spec.trained.items():
        rate = role.optimizer.learning_rate
        if role.zero.state_dtype == "bfloat16" and rate < LOST_BELOW:
            what = f"{name}.zero.state_dtype is bfloat16, and "
            what += f"{name}.optimizer.learning_rate {rate:g}"
            why = "bfloat16 numbers about 0.02, as weights are, lie 1.2e-4 apart; AdamW moves a "
            why += "weight by about the learning rate, and what is under half of that is rounded "
            why += "away"
            fix = f"{name}.zero.state_dtype: float32 (in host memory, with "
            fix += f"{name}.zero.optimizer_offload: cpu), or a rate of 1e-4 and more"
            yield Problem("lost-updates", "warning", what, why, fix)


def zero_plus_plus(job: Job) -> Iterator[Problem]:
    """Of a run on the CPU."""
    for name, role in job.spec.trained.items():
        asked = [f"{name}.zero.{key}" for key in _asked(role.zero)]
        if asked and job.device == "cpu":
            what = f"{', '.join(asked)}: the run is on the CPU"
            why = "DeepSpeed quantises with CUDA kernels, and within a machine there is no slow "
            why += "link to spare"
            fix = "leave it out, or cluster.device: cuda"
            yield Problem("zero-plus-plus", "error", what, why, fix)


def _asked(zero: ZeroConfig) -> Iterator[str]:
    if zero.quantized_weights:
        yield "quantized_weights"
    if zero.quantized_gradients:
        yield "quantized_gradients"
    if zero.hpz_partition_size > 1:
        yield "hpz_partition_size"
