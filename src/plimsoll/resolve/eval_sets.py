"""The sets of held-out prompts that a run answers, and the names of their metrics."""

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
        sampling: the sampling settings of the responses.
        sampling_key: the dotted key of the section with these settings.
        pass_by: the part of the reward that decides whether a response passes; None if pass@k is
            not reported.
        threshold: a response passes if that part is at least this.
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
        """The beginning of its metrics' names: `NAME/`, or "" for a set without a name."""
        name = set_name(self.key)
        return f"{name}/" if name else ""

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k in pass@k: powers of two and `responses`; () if there is no pass@k."""
        if self.pass_by is None:
            return ()
        powers = (2**i for i in range(self.responses.bit_length()))
        return tuple(sorted({*powers, self.responses}))

    @property
    def votes(self) -> bool:
        """Whether maj@k may be reported, with k = `responses`."""
        return self.pass_by is not None and self.responses > 1

    @property
    def passing(self) -> Iterator[str]:
        """The names of all pass@k and maj@k metrics, without the prefix."""
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
    """Return the part of the reward that decides whether a response passes, or None.

    The default is the part with the largest weight, but never a reward model, as its scores have no
    fixed scale. A single set with one response per prompt has pass@k only if the config asks.
    """
    is_asked_for = source.pass_by is not None or source.pass_threshold is not None
    if not (named or is_asked_for or source.responses > 1):
        return None
    if source.pass_by is not None:
        return source.pass_by
    if not config.rewards:
        return ENVIRONMENT if config.environments else None
    return max(config.rewards, key=lambda name: config.rewards[name].weight)
