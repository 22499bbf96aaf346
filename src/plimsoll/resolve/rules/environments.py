"""Rules about environments and their episodes."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.problems import Problem, Section, invalid
from plimsoll.config.rl import ENVIRONMENT, RlConfig

_LEAST = 2
"""The least tokens of a turn together with its answer."""


def check_environments(config: RlConfig) -> Iterator[Problem]:
    """Yield problems of a config's environments; it may have none."""
    yield from _columns(config)
    if not config.environments:
        return
    yield from _templates(config)
    for name in config.environments:
        yield from _environment(name, config)
    if ENVIRONMENT in config.rewards or ENVIRONMENT in config.scoring_models:
        why = "What an environment gives is shown under this name."
        fix = "another name for this part of the reward"
        yield invalid(f"rewards.{ENVIRONMENT}", "given", why, fix, code="reward-name")


def _columns(config: RlConfig) -> Iterator[Problem]:
    """Yield a problem if rows do not name one of several environments, or name one of none."""
    several = len(config.environments) > 1
    for key, source in config.data.sources().items():
        at = Section(key, source)
        if several and source.environment is None:
            why = f"environments has {', '.join(config.environments)}, and no column says which is "
            why += "a row's own."
            fix = f"{key}.environment: COLUMN, a column with one of these names"
            yield at.conflict("environment", why, fix, "environment-column")
        if source.environment is not None and not config.environments:
            why = "There are no environments for rows to name."
            fix = f"leave {key}.environment out, or give environments"
            yield at.conflict("environment", why, fix, "environment-column")


def _templates(config: RlConfig) -> Iterator[Problem]:
    """Yield a problem if a source has another chat template: all turns use `data.chat_template`."""
    for key, source in config.data.sources().items():
        if source.chat_template not in (None, config.data.chat_template):
            why = "The turns of episodes are written by data.chat_template, whatever their source."
            fix = f"leave {key}.chat_template out, or set data.chat_template"
            yield Section(key, source).conflict("chat_template", why, fix, "environment-template")


def _environment(name: str, config: RlConfig) -> Iterator[Problem]:
    environment, key = config.environments[name], f"environments.{name}"
    at, turn = Section(key, environment), config.rollout.sampling.max_new_tokens
    if environment.max_tokens < turn:
        why = f"A single turn may have rollout.sampling.max_new_tokens = {turn} tokens."
        fix = f"at least {turn}, or fewer rollout.sampling.max_new_tokens"
        yield at.conflict("max_tokens", why, fix, "environment-length")
    least = _LEAST * environment.max_turns
    if environment.max_tokens < least:
        why = f"{key}.max_turns is {environment.max_turns}, and a turn with its answer takes "
        why += f"{_LEAST} tokens at least."
        fix = f"at least {least}, or fewer {key}.max_turns"
        yield at.conflict("max_tokens", why, fix, "environment-length")
    if environment.memory_gib is not None and not environment.process:
        why = "The memory of an environment is limited only in a process of its own."
        fix = f"{key}.process: true, or leave {key}.memory_gib out"
        yield at.conflict("memory_gib", why, fix, "environment-memory")
