"""The sets of held-out prompts that a run answers, and the names of their figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.config.data import EvalSource, set_name
from plimsoll.config.rl import ENVIRONMENT, RlConfig
from plimsoll.config.rollout import SamplingConfig

TRAINING_SAMPLING = "rollout.sampling"


@dataclass(frozen=True)
class EvalSet:
    """One set of held-out prompts, with every default decided.

    Attributes:
        key: the dotted key of its source in the config.
        responses: responses to each prompt.
        sampling: how they are sampled.
        sampling_key: the dotted key of the section that says so.
        pass_by: the part of the reward by which a response passes; None without such figures.
        threshold: the value of that part from which on a response passes.
        by_source: whether its rows name their sources.
    """

    key: str
    responses: int
    sampling: SamplingConfig
    sampling_key: str
    pass_by: str | None
    threshold: float
    by_source: bool

    @property
    def prefix(self) -> str:
        """The beginning of its figures' names: its own name, if it has one."""
        name = set_name(self.key)
        return f"{name}/" if name else ""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of its pass@k: powers of two, and the number of responses; () if nothing passes."""
        if self.pass_by is None:
            return ()
        powers = (2**i for i in range(self.responses.bit_length()))
        return tuple(sorted({*powers, self.responses}))

    @property
    def votes(self) -> bool:
        """Whether maj@k is reported: over all responses to a prompt, if the rule has answers."""
        return self.pass_by is not None and self.responses > 1

    @property
    def passing(self) -> Iterator[str]:
        """The names of all these figures, without their prefix."""
        yield from (f"pass@{k}" for k in self.ks)
        if self.votes:
            yield f"maj@{self.responses}"


def eval_sets(config: RlConfig) -> tuple[EvalSet, ...]:
    """Return all sets of a config, in its order."""
    return tuple(_eval_set(config, *entry) for entry in config.data.eval_sources().items())


def _eval_set(config: RlConfig, key: str, source: EvalSource) -> EvalSet:
    sections = {
        f"{key}.sampling": source.sampling,
        "eval_sampling": config.eval_sampling,
        TRAINING_SAMPLING: config.rollout.sampling,
    }
    sampling_key, sampling = next((k, given) for k, given in sections.items() if given is not None)
    return EvalSet(
        key,
        source.responses,
        sampling,
        sampling_key,
        _pass_by(config, source, named=bool(set_name(key))),
        1.0 if source.pass_threshold is None else source.pass_threshold,
        source.source is not None,
    )


def _pass_by(config: RlConfig, source: EvalSource, *, named: bool) -> str | None:
    """Return the part of the reward by which responses pass, by default the one that weighs most.

    A single set of one response to each prompt has such figures only if they are asked for; a
    reward model, whose scores have no scale, has them only by name.
    """
    is_asked_for = source.pass_by is not None or source.pass_threshold is not None
    if not (named or is_asked_for or source.responses > 1):
        return None
    if source.pass_by is not None:
        return source.pass_by
    if not config.rewards:
        return ENVIRONMENT if config.environments else None
    return max(config.rewards, key=lambda name: config.rewards[name].weight)
