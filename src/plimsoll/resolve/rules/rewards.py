"""Rules about the parts of the reward, and about environments and their episodes."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from urllib.parse import urlsplit

from plimsoll.config.problems import Code, Problem, Section, invalid
from plimsoll.config.reward import HttpReward, JudgeReward, RewardConfig
from plimsoll.config.rl import ENVIRONMENT, RlConfig


def password_in(key: str, url: str, fix: str, code: Code | None = None) -> Iterator[Problem]:
    """Yield a problem, which does not show the password, if a URL has a user or a password."""
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    if at:
        shown = f"{parts.scheme}://***@{host}{parts.path}"
        why = "A password in a URL would be written into the run's directory, logs and errors."
        yield invalid(key, shown, why, fix, code=code)


_CODE: Code = "reward-settings"
_EVALUATES = "reasoning_gym"
_OF_FUNCTIONS = ("batch", "time_limit", "retries", "process", "memory_gib", "at_once", "options")


def reward_part(key: str, part: RewardConfig) -> Iterator[Problem]:
    """Yield problems of the part of the reward at `key`."""
    at = Section(key, part)
    forms = {"name": part.name, "http": part.http, "judge": part.judge}
    given = [form for form, value in forms.items() if value]
    if len(given) != 1:
        why = f"A part of the reward has one source, and {' and '.join(given) or 'none'} is given."
        fix = f"one of {key}.name, {key}.http and {key}.judge"
        yield at.invalid(given[0] if given else "name", why, fix, _CODE)
    if not part.name:
        for name in _OF_FUNCTIONS:
            if getattr(part, name) != RewardConfig.model_fields[name].default:
                why = "It is for functions, and there is no name of one."
                yield at.invalid(name, why, f"leave {key}.{name} out", _CODE)
    elif part.memory_gib is not None and not part.process:
        why = "The memory of a function is limited only in a process of its own."
        yield at.conflict("memory_gib", why, f"{key}.process: true", _CODE)
    elif part.name == _EVALUATES and not part.process:
        why = "Some tasks of the library evaluate a response as Python, which nothing ends."
        yield at.conflict("process", why, f"{key}.process: true", _CODE)
    if part.clip is not None and part.clip[0] >= part.clip[1]:
        why = "It is the lowest and the highest value, and the first is not below the second."
        yield at.invalid("clip", why, f"{key}.clip: [lowest, highest]", _CODE)
    if part.http is not None:
        yield from _http(f"{key}.http", part.http)
    if part.judge is not None:
        yield from _judge(f"{key}.judge", part.judge)


def _http(key: str, http: HttpReward) -> Iterator[Problem]:
    at = Section(key, http)
    if not http.urls:
        yield at.invalid("urls", "There is no server to ask.", _servers(key), _CODE)
    for url in http.urls:
        if problems := [*password_in(f"{key}.urls", url, _token(key), _CODE)]:
            yield from problems
        elif not _is_address(url):
            why = "It is no address of a server."
            yield invalid(f"{key}.urls", url, why, _servers(key), code=_CODE)
    if http.tokenizer is not None and http.format == "plimsoll":
        why = "Plimsoll's format holds texts and the actor's tokens as they are."
        fix = f"{key}.format: openrlhf or vllm, or leave it out"
        yield at.conflict("tokenizer", why, fix, _CODE)
    if http.chat_template is not None and (http.format != "vllm" or http.tokenizer is None):
        why = f"It is of the tokenizer of {key}.format: vllm."
        fix = f"{key}.format: vllm with {key}.tokenizer, or leave it out"
        yield at.conflict("chat_template", why, fix, _CODE)


def _servers(key: str) -> str:
    return f"{key}.urls: [http://host:8000/score], with one or more"


def _token(key: str) -> str:
    return f"{key}.api_key: the environment variable of a token, and the URL without `...@`"


def _judge(key: str, judge: JudgeReward) -> Iterator[Problem]:
    at = Section(key, judge)
    if problems := [*password_in(f"{key}.url", judge.url, _token(key), _CODE)]:
        yield from problems
    elif not _is_address(judge.url):
        fix = f"{key}.url: https://host/v1"
        yield at.invalid("url", "It is no address of an endpoint.", fix, _CODE)
    if judge.low >= judge.high:
        why = f"The lowest score must be below the highest, and {key}.high is {judge.high:g}."
        yield at.invalid("low", why, "a lower one", _CODE)
    yield from _prompt(at, key, judge.prompt)
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        yield at.invalid("pattern", f"It is no regular expression: {error}.", "another one", _CODE)
    else:
        if not groups:
            why = "It has no group, such as (\\d+), that is the score."
            yield at.invalid("pattern", why, "put parentheses around the score", _CODE)


def _prompt(at: Section, key: str, prompt: str) -> Iterator[Problem]:
    try:
        named = [field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None]
    except ValueError as error:
        fix = "{{ and }} for plain braces"
        yield at.invalid("prompt", f"It is no template: {error}.", fix, _CODE)
        return
    if "response" not in named:
        why = "It does not show the response that is to be judged."
        yield at.invalid("prompt", why, f"{{response}} somewhere in {key}.prompt", _CODE)


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


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
