"""Find the setting that makes a sampler's log-probs differ from the trainer's, by trying.

`plimsoll explain-gap CONFIG`

The actor and the engines of a config are loaded, and compared on the same text: on prompts that the
engine scores, and on answers that it samples, which go by its cache. Then the same is done with one
setting changed at a time. A setting whose change closes the gap is its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from plimsoll.config.cluster import device_of
from plimsoll.config.rl import RlConfig
from plimsoll.config.yaml_tree import value_at
from plimsoll.data.loading import UNSEEN
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs.which import load_any
from plimsoll.model.disturbance import Disturbance
from plimsoll.records import Floats, Ints, Prompt
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.sampling import probe_sequences
from plimsoll.rl.setup import (
    coarser_dtype,
    free_memory_for_sync,
    prompt_loader,
    sends_first,
    start,
    wake_sleeping_ranks,
    weight_route,
)
from plimsoll.sync.proof import WeightRoute
from plimsoll.train.loading import load_role
from plimsoll.train.run_data import template_of

_ROUNDINGS = 4.0
"""A gap of as many roundings is no fault, as in the proof of a sync (`sync.max_roundings`)."""
_SMALL = "The gap is no larger than what rounding does to the trainer's own log-probs."
CLOSED = 0.5
"""A change that leaves at most this part of the gap is named as a cause."""


@dataclass(frozen=True)
class Gap:
    """Mean absolute differences of log-probs between an engine and the trainer, nats per token."""

    scored: float
    """Of prompts that the engine scores."""
    sampled: float
    """Of the tokens of its own answers."""
    packed: float
    """Between the trainer's log-probs of prompts packed together and alone."""
    rounding: float
    """By which rounding changes the trainer's own log-probs."""

    @property
    def largest(self) -> float:
        """The larger difference between engine and trainer."""
        return max(self.scored, self.sampled)


GapTrial = tuple[str, Mapping[str, str]]
"""A change of settings: what it is, and the flags over the config."""


def explain_gap(config: str, flags: Sequence[str], tell: Callable[[str], None]) -> str:
    """Return a table of the gap with each change, and which change closes it.

    `tell` gets a line before each trial, which loads the model and starts the engines.

    Raises ConfigError if the config has no engines, and the errors of a run that cannot start.
    """
    spec = load_any(config, flags)
    if not isinstance(spec.config, RlConfig) or spec.engines is None:
        raise ConfigError(f"{config} starts no engines. Give a config of plimsoll rl that samples.")
    if spec.config.rollout.routing == "sampled":
        tell("rollout.routing is sampled: measured with live routers, as weight syncs are")
        flags = [*flags, "--rollout.routing", "live"]
        spec = load_any(config, flags)
        assert isinstance(spec.config, RlConfig)
    tell("as the config says ...")
    base = measure_gap(spec)
    rows, closing_changes = [("as the config says", base)], []
    failed: list[str] = []
    for what, changed in changes(spec):
        tell(f"{what} ...")
        more = [word for key, value in changed.items() for word in (f"--{key}", value)]
        try:
            gap = measure_gap(load_any(config, [*flags, *more]))
        except (PlimsollError, RuntimeError, OSError, ValueError) as error:
            failed.append(f"not tried: {what}: {type(error).__name__}: {error}")
            continue
        rows.append((what, gap))
        if gap.largest <= CLOSED * base.largest:
            closing_changes.append((gap.largest, what, " ".join(more)))
    return "\n".join([*_table(rows), "", _verdict(base, closing_changes), *failed])


def changes(spec: RunSpec[RlConfig]) -> Iterator[GapTrial]:
    """Yield the changes that are tried, without those that are the config's own values."""
    values = spec.config.model_dump()
    trainer, engine = {"actor.model.dtype": "float32"}, {"rollout.dtype": "float32"}
    every = {
        "trainer in float32": trainer,
        "engine in float32": engine,
        "both in float32": trainer | engine,
        "trainer with PyTorch's attention": {"actor.model.attention": "sdpa"},
        "trainer with its own kernels": {"actor.model.kernels": "own"},
    }
    arguments = value_at(values, ("rollout", "vllm", "arguments"))
    if arguments is not None:
        key = "rollout.vllm.arguments"
        every["engine without prefix cache"] = {f"{key}.enable_prefix_caching": "false"}
        if device_of(spec.cluster) == "cuda":  # on the CPU nothing is compiled
            every["engine without compilation"] = {f"{key}.enforce_eager": "true"}
        if arguments.get("quantization"):
            every["engine without quantisation"] = {f"{key}.quantization": "null"}
    decided = {"actor.model.dtype": spec.actor.model.dtype}
    for what, changed in every.items():
        own = {key: value_at(values, key.split(".")) for key in changed} | decided
        if any(str(own[key]).lower() != value for key, value in changed.items()):
            yield what, changed


def measure_gap(spec: RunSpec[RlConfig]) -> Gap:
    """Load the actor and start the engines as a run does, and return what they differ by."""
    prompts = _prompts(spec)
    with closing(start(spec, prompts)) as cluster:
        wake_sleeping_ranks(cluster, spec)
        load_role(cluster, spec, "actor")
        free_memory_for_sync(cluster, spec)
        route = weight_route(cluster, spec)
        if sends_first(spec):
            route.transfer(spec.config.rollout.sync.decided_bucket, 0)
        return _compare(route, probe_sequences(prompts, spec), coarser_dtype(spec))


def _prompts(spec: RunSpec[RlConfig]) -> list[Prompt]:
    """Return as many prompts as a run's proof of weights reads."""
    source = next(iter(spec.data.train_sources().values()))
    few = source.model_copy(update={"limit": spec.config.rollout.sync.probe_sequences})
    template = template_of(spec, spec.data.template_of(source))
    data = spec.data.model_copy(update={"cache": "none"})  # whose name is a hash of all rows
    return [*prompt_loader(spec)(data, few, template, UNSEEN).items]


def _compare(route: WeightRoute, probe: Sequence[Ints], rounded_as: str) -> Gap:
    expected = np.concatenate(route.trainer_log_probs(probe))
    rounded = np.concatenate(route.trainer_log_probs(probe, Disturbance(rounded_as)))
    alone = np.concatenate([route.trainer_log_probs([one])[0] for one in probe])
    scored = [np.concatenate(own) for own in route.engine_log_probs(probe)]
    sampled = []
    for answers in route.engine_answers(probe):
        whole = [np.concatenate([a.prompt.tokens, a.response_tokens]) for a in answers]
        found = zip(route.trainer_log_probs(whole), answers, strict=True)
        trainer = np.concatenate([own[-len(a.response_tokens) :] for own, a in found])
        engine = np.concatenate([a.sampler_logprobs for a in answers])
        sampled.append(_mean_gap(engine, trainer))
    return Gap(
        max(_mean_gap(own, expected) for own in scored),
        max(sampled),
        _mean_gap(alone, expected),
        _mean_gap(rounded, expected),
    )


def _mean_gap(one: Floats, other: Floats) -> float:
    return float(np.abs(one - other).mean())


def _table(rows: Sequence[tuple[str, Gap]]) -> list[str]:
    head = f"{'nats per token':<36}{'scored':>10}{'sampled':>10}{'packed':>10}{'rounding':>10}"
    return [head] + [
        f"{what:<36}{gap.scored:>10.2g}{gap.sampled:>10.2g}{gap.packed:>10.2g}{gap.rounding:>10.2g}"
        for what, gap in rows
    ]


def _verdict(base: Gap, found: Sequence[tuple[float, str, str]]) -> str:
    """Return what is at fault; `found` has the gap, the name and the flags of closing changes."""
    small = base.largest <= _ROUNDINGS * base.rounding
    lines = [_SMALL] if small else []
    if not found and base.packed > _ROUNDINGS * base.rounding:
        lines.append(
            "The trainer's own log-probs depend on what is packed beside a sequence: its packed "
            "attention is at fault, not the engine. Please report it, with the model's name."
        )
    elif not found and not small:
        lines.append(
            "No change closes the gap: the engine has other weights than the trainer, or computes "
            "this model in another way. `rollout.sync.rehearse: true` finds the layer if a run "
            "begins with it."
        )
    elif found:
        lines.append("What closes the gap, the most first:")
    lines += (
        f"  {what} leaves {gap:.2g} of {base.largest:.2g}: {flags}"
        for gap, what, flags in sorted(found, key=lambda change: change[0])
    )
    return "\n".join(lines)
