"""What must agree about the sets of held-out prompts of a job that samples."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from plimsoll.config.data import EvalSource, set_name
from plimsoll.config.problems import Problem, Section, conflict, invalid, show
from plimsoll.config.rl import ENVIRONMENT, RlConfig
from plimsoll.spec.eval_sets import EvalSet, eval_sets


def answered(config: RlConfig) -> Iterator[Problem]:
    """How held-out prompts are answered, and which answers pass."""
    sets, sources = eval_sets(config), config.data.eval_sources()
    for one in sets:
        yield from _responses(Section(one.key, sources[one.key]), one, config)
        yield from _passing(Section(one.key, sources[one.key]), sources[one.key], config)
        yield from _name(one)
    if config.eval_sampling is None or any(one.sampling_key == "eval_sampling" for one in sets):
        return
    why = "There are no held-out prompts to answer: data.eval is not given."
    fix = "give data.eval.path and its columns, or leave eval_sampling out"
    if sets:
        why = "Nothing reads it: each set of data.eval has a sampling of its own."
        fix = "leave eval_sampling out, or the sampling of a set"
    given = show(config.eval_sampling.model_dump(mode="json", exclude_unset=True))
    yield conflict("eval_sampling", given, why, fix, code="no-eval-data")


def _responses(at: Section, one: EvalSet, config: RlConfig) -> Iterator[Problem]:
    if one.responses > 1 and one.sampling.temperature == 0:
        why = f"Greedy responses to a prompt are all the same ({one.sampling_key}.temperature: 0)."
        fix = f"{one.key}.responses: 1, or {one.key}.sampling with a temperature above 0"
        yield at.conflict("responses", why, fix, "sampling-contradicts")
    most = config.rollout.max_sequences
    if config.rollout.engine == "transformers" and one.responses > most:
        why = "The transformers engine works on all responses to a prompt at once, and "
        why += f"rollout.max_sequences is {most}."
        fix = f"at most {most}, or rollout.max_sequences: {one.responses}, or rollout.engine: vllm"
        yield at.conflict("responses", why, fix, "transformers-engine")


def _passing(at: Section, source: EvalSource, config: RlConfig) -> Iterator[Problem]:
    played = [ENVIRONMENT] if config.environments else []
    parts = [*played, *config.rewards, *config.scoring_models]
    if source.pass_by is not None and source.pass_by not in parts:
        close = get_close_matches(source.pass_by, parts, n=1)
        fix = f"did you mean {close[0]}?" if close else f"one of {', '.join(parts)}"
        yield at.invalid("pass_by", "It is no part of the reward.", fix, "reward-name")
    if (
        source.pass_threshold is not None
        and source.pass_by is None
        and not (config.rewards or played)
    ):
        why = f"{at.key}.pass_by does not say which reward model it is of."
        fix = f"{at.key}.pass_by: one of {', '.join(parts)}"
        yield at.conflict("pass_threshold", why, fix, "reward-name")


def _name(one: EvalSet) -> Iterator[Problem]:
    name = set_name(one.key)
    if "/" in name:
        why = "In the names of figures `/` stands between a set, a source and what is told of them."
        yield invalid(one.key, "given", why, f"another name, such as {name.replace('/', '_')}")
