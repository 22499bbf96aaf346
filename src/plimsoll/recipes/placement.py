"""What a config would run, in which process, and how much each step sees; as text."""

from __future__ import annotations

from plimsoll.config.counting import counted
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.jobs import JobConfig, PairJobConfig, RlJobConfig, SequenceJobConfig
from plimsoll.config.roles import given_frozen, is_compared, is_precomputed, trained_roles
from plimsoll.config.threads import most_at_once


def placement(config: JobConfig) -> str:
    """The processes of the run and the size of a step, for a person to read."""
    return _table("Processes", _processes(config)) + _table("A step", _step(config))


def _step(config: JobConfig) -> list[tuple[str, str]]:
    if isinstance(config, RlJobConfig):
        return _sampled_step(config)
    return _pairs_step(config) if isinstance(config, PairJobConfig) else _sequences_step(config)


def _processes(config: JobConfig) -> list[tuple[str, str]]:
    cluster = config.cluster
    roles = _roles(config)
    critic = next((role for role in roles if role.startswith("critic ")), None)
    if cluster.where == "local":
        sampler = ["rollout (transformers)"] if isinstance(config, RlJobConfig) else []
        return [
            ("this process", "the recipe, rank 0 of 1, no Ray"),
            *(("", role) for role in [*roles, *sampler]),
            ("device, threads", f"{cluster.device}, {cluster.threads or 'all cores'}"),
        ]
    where = "this machine" if cluster.address is None else cluster.address
    rows = [
        ("this process", f"the recipe; Ray on {where}"),
        (_several("rank", cluster.ranks), f"device {cluster.device}"),
        *(("", role) for role in roles if role != critic or cluster.critic_ranks is None),
    ]
    if cluster.critic_ranks is not None and critic is not None:
        rows.append((_several("critic rank", cluster.critic_ranks), critic))
    engines = 0
    if isinstance(config, RlJobConfig):
        rows.append((_several("engine", config.rollout.engines), _engine(config)))
        engines = config.rollout.engines
    threads = cluster.threads or f"the machine's cores / {most_at_once(cluster, engines)}"
    return [*rows, ("threads of each", str(threads))]


def _roles(config: JobConfig) -> list[str]:
    frozen = given_frozen(config)
    reference = frozen.pop("reference", None)
    return [
        *(_trained(name, role) for name, role in trained_roles(config).items()),
        *([_reference(config, reference)] if is_compared(config) else []),
        *(_frozen(name, role) for name, role in frozen.items()),
    ]


def _trained(name: str, role: TrainedRole) -> str:
    zero = role.zero
    moved = {"optimizer": zero.optimizer_offload, "weights": zero.parameter_offload}
    on_host = [what for what, where in moved.items() if where == "cpu"]
    host = f", {' and '.join(on_host)} in host memory" if on_host else ""
    adapter = f", adapter of rank {role.adapter.rank}" if role.adapter else ""
    return f"{name} {role.model.path} ({_dtype(role)}{adapter}, ZeRO stage {zero.stage}{host})"


def _reference(config: JobConfig, role: FrozenRole | None) -> str:
    before = is_precomputed(config)
    if role is None and config.actor.adapter is not None and not before:
        return "reference (the actor with its adapter switched off)"
    when = ", before it is loaded" if before else ""
    if role is None:
        return f"reference (the actor's first weights{when})"
    return _frozen("reference", role) + (", before the actor is loaded" if before else "")


def _frozen(name: str, role: FrozenRole) -> str:
    whole = "whole on every rank" if role.stage == 0 else "divided over the ranks"
    host = ", in host memory while it does not score" if role.offload == "cpu" else ""
    return f"{name} {role.model.path} ({_dtype(role)}, {whole}{host})"


def _dtype(role: TrainedRole | FrozenRole) -> str:
    model = role.model
    return model.dtype if model.quantization == "none" else f"{model.quantization}, {model.dtype}"


def _engine(config: RlJobConfig) -> str:
    rollout = config.rollout
    shared = f", tensor parallel {rollout.tensor_parallel}" if rollout.tensor_parallel > 1 else ""
    return (
        f"{rollout.engine} ({rollout.dtype}{shared}), at most "
        f"{counted(rollout.max_sequences, 'sequence')} at once"
    )


def _sequences_step(config: SequenceJobConfig) -> list[tuple[str, str]]:
    longest, count = config.data.max_tokens, config.batch.sequences
    steps = counted(config.run.steps, "step")
    return [
        ("sequences", f"{count:,}, of at most {longest:,} tokens: {count * longest:,} at most"),
        ("micro-batch", f"at most {config.batch.micro_batch_tokens:,} tokens on a rank"),
        ("of the run", f"{steps}, {counted(config.run.steps * count, 'sequence')}"),
    ]


def _pairs_step(config: PairJobConfig) -> list[tuple[str, str]]:
    longest, count = config.data.max_tokens, config.batch.pairs
    steps = counted(config.run.steps, "step")
    return [
        ("pairs", f"{count:,}, of two sequences of at most {longest:,} tokens each"),
        ("prompts", f"computed {'once' if config.batch.share_prompts else 'for each response'}"),
        ("micro-batch", f"at most {config.batch.micro_batch_tokens:,} tokens on a rank"),
        ("of the run", f"{steps}, {counted(config.run.steps * count, 'pair')}"),
    ]


def _sampled_step(config: RlJobConfig) -> list[tuple[str, str]]:
    batch, algorithm = config.batch, config.algorithm
    count = batch.prompts * batch.responses
    new = config.rollout.sampling.max_new_tokens
    longest = config.data.max_tokens + new
    per_update = count // algorithm.mini_batches
    updates = algorithm.epochs * algorithm.mini_batches
    steps = counted(config.run.steps, "step")
    prompts, responses = counted(batch.prompts, "prompt"), counted(batch.responses, "response")
    return [
        ("sequences", f"{prompts} x {responses} = {count:,}"),
        (
            "tokens",
            f"at most {config.data.max_tokens:,} + {new:,} = {longest:,} a sequence, "
            f"{count * longest:,} in all",
        ),
        ("micro-batch", f"at most {batch.micro_batch_tokens:,} tokens on a rank"),
        ("optimizer steps", f"{updates:,}, of {counted(per_update, 'sequence')} each"),
        ("of the run", f"{steps}, {counted(config.run.steps * count, 'sequence')}"),
    ]


def _several(name: str, count: int) -> str:
    return f"{name} 0" if count == 1 else f"{name}s 0-{count - 1}"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join([title, *(f"  {name:<16} {text}" for name, text in rows)]) + "\n"
